"""Follows decisions in the store that all coordinators share: reads them every second, less often while idle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from coordinator.replicas.activity import Activity
from specdec.contract.errors import SpecdecError

#: Interval at which decisions are exchanged with the store.
POLL_S = 1.0

_log = logging.getLogger(__name__)


class StoreWatch:
    """A task that calls a function again and again. Used from one event loop."""

    def __init__(self, what: str, sync: Callable[[], Awaitable[None]]) -> None:
        """
        Args:
            what: name of the decisions, for the log.
            sync: exchanges the decisions; it may raise SpecdecError, and is called again later.
        """
        self._what, self._sync = what, sync
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self, activity: Activity) -> None:
        """Start to follow the store in the background, less often while the coordinator is idle."""
        self._watching = asyncio.create_task(self._watch(activity), name=f"{self._what} in the store")

    async def close(self) -> None:
        """Stop following the store. Idempotent."""
        if self._watching is not None:
            self._is_closed = True  # the store's client may swallow a cancellation while it connects
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def _watch(self, activity: Activity) -> None:
        warned = ""
        while not self._is_closed:
            try:
                await self._sync()
                warned = ""
            except SpecdecError as error:
                if error.message != warned:  # log an error once, not at every attempt
                    warned = error.message
                    _log.warning("%s not synchronised: %s", self._what, warned)
            await activity.pause(POLL_S)
