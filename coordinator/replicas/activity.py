"""Know whether a coordinator serves requests, and lengthen the pauses of its periodic checks while it does not.

`generation_service` reports requests; the checks of `pool`, `store_watch` and `liveness` pause by this module. The next
request ends a pause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

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
