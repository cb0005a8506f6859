"""Tracks whether this coordinator can serve: a target replica is connected, and the store answers.

The result is reported through the health service, by which Kubernetes and clients choose among coordinators. Calls are
accepted in both states, since a missing part may return before they time out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from specdec.contract.errors import SpecdecError
from specdec.rpc.ticks import tick
from specdec.state.store import SessionStore

#: Pause between two pings of the store, and limit on the wait for an answer. The store counts as down after two missed
#: pings in a row, because a pause of this process can cause one. Both together take less time than a call waits for the
#: store, so a client whose call fails already sees this coordinator as not serving.
LOOK_INTERVAL_S = 1.0
_ANSWER_S = 1.0
_NUM_MISSED = 2

_log = logging.getLogger(__name__)


class Readiness:
    """Calls `tell` whenever readiness changes. It starts as not ready."""

    def __init__(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        self._tell = tell
        self._has_target = False
        self._has_store = True
        self._was_ready = False

    async def note_targets(self, has_target: bool) -> None:
        self._has_target = has_target
        await self._tell_change()

    async def watch_store(self, store: SessionStore) -> None:
        """Ping the store until cancelled. The first ping follows `LOOK_INTERVAL_S` after start-up, which pinged it."""
        num_missed = 0
        while True:
            await tick(LOOK_INTERVAL_S)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await store.ping()
            except (SpecdecError, TimeoutError) as error:
                num_missed += 1
                if num_missed == _NUM_MISSED:
                    reason = str(error) or f"no answer within {_ANSWER_S} s"
                    _log.warning("store unreachable; not serving until it answers: %s", reason)
            else:
                if num_missed >= _NUM_MISSED:
                    _log.info("store reachable again")
                num_missed = 0
            self._has_store = num_missed < _NUM_MISSED
            await self._tell_change()

    async def _tell_change(self) -> None:
        is_ready = self._has_target and self._has_store
        if is_ready != self._was_ready:
            self._was_ready = is_ready
            await self._tell(is_ready)
