"""Whether this coordinator can serve: a target replica is connected, and its store answers.

What it says goes to health, by which Kubernetes and clients with several coordinators choose. Calls are taken either
way: what is away may be back before they give up. Built by `__main__`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from specdec.errors import SpecdecError
from specdec.state.store import SessionStore

#: Between two looks at the store, and for its answer. Two that are missed in a row count, which a pause of this process
#: cannot make; together they are less than what a call waits for the store, so that whoever is refused goes elsewhere.
LOOK_INTERVAL_S = 1.0
_ANSWER_S = 1.0
_NUM_MISSED = 2

_log = logging.getLogger(__name__)


class Readiness:
    """Tells whenever the answer changes; at first it is no."""

    def __init__(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        self._tell = tell
        self._has_target = False
        self._has_store = True
        self._was_ready = False

    async def note_targets(self, has_target: bool) -> None:
        self._has_target = has_target
        await self._tell_change()

    async def watch_store(self, store: SessionStore) -> None:
        """Looks for ever. Its first look is due `LOOK_INTERVAL_S` from now: whoever starts has asked the store."""
        num_missed = 0
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await store.ping()
            except (SpecdecError, TimeoutError) as error:
                num_missed += 1
                if num_missed == _NUM_MISSED:
                    _log.warning("not serving until the store answers: %s", str(error) or f"none within {_ANSWER_S} s")
            else:
                if num_missed >= _NUM_MISSED:
                    _log.info("the store answers again")
                num_missed = 0
            self._has_store = num_missed < _NUM_MISSED
            await self._tell_change()

    async def _tell_change(self) -> None:
        is_ready = self._has_target and self._has_store
        if is_ready != self._was_ready:
            self._was_ready = is_ready
            await self._tell(is_ready)
