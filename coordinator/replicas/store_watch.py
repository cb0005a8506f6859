"""Periodic checks of a coordinator: their pauses, and decisions in the store that all coordinators share.

`generation_service` reports requests to `Activity`. While no request runs, the checks of `pool`, `liveness` and
`StoreWatch` pause for longer; the next request ends a pause. `StoreWatch` reads a shared decision every second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from specdec.contract.errors import SpecdecError
from specdec.rpc.ticks import tick, until_tick_s

#: Time after the last request from which on a coordinator is idle.
IDLE_AFTER_S = 30.0
#: Pauses of an idle coordinator are longer by this factor.
IDLE_FACTOR = 5.0


class Activity:
    """The requests of a coordinator. Used from one event loop."""

    def __init__(self, on_wake: Callable[[], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            on_wake: called when a request comes to an idle coordinator.
            clock: monotonic seconds.
        """
        self._on_wake, self._clock = on_wake, clock
        self._num_running = 0
        self._noted_s = clock()
        self._woken = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        return not self._num_running and self._clock() - self._noted_s > IDLE_AFTER_S

    def begin(self) -> None:
        """Note that a request waits or runs from now on."""
        was_idle, self._noted_s = self.is_idle, self._clock()
        self._num_running += 1
        if was_idle:
            self._woken.set()
            self._on_wake()

    def end(self) -> None:
        """Note that a request has ended, or has ended its wait."""
        self._num_running -= 1
        self._noted_s = self._clock()

    async def pause(self, interval_s: float) -> None:
        """Sleep until the next multiple of an interval, or of a longer one while idle, but not beyond a request."""
        if not self.is_idle:
            await tick(interval_s)
            return
        self._woken.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(until_tick_s(IDLE_FACTOR * interval_s)):
                await self._woken.wait()


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
