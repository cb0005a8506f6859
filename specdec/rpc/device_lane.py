"""A replica's second lane, which the device's own thread reads: no other one is woken for a call, or for its answer.

It stands still while a step runs, as what came meanwhile would wait for the device anyhow; a device that hangs stands
still for long, so its callers are hung up on, and find out over the other lane what is wrong. Not here: when a caller
uses it (`client`), what a lane does (`lane_server`). Used by `servicer`, from the service's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from specdec.rpc.lane_server import LaneServer

#: For the device's thread to come to what it was asked to end, beyond the calls' own time.
_TURN_TIMEOUT_S = 1.0


class DeviceLane:
    """The lane that is open in the event loop of a device thread, or none."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop, make_server: Callable[[], LaneServer]) -> None:
        """`make_server` makes a lane that was not started."""
        self._event_loop = event_loop
        self._make_server = make_server
        self._server: LaneServer | None = None

    @property
    def name(self) -> str:
        """ "" while there is none."""
        return "" if self._server is None else self._server.name

    async def open(self) -> None:
        """Opens one under a name that nobody had."""
        server = self._make_server()
        await self._run(server.start(), timeout_s=_TURN_TIMEOUT_S)
        self._server = server

    def cut(self) -> None:
        """Hangs up on everybody though the device hangs; there is none until `open`. Idempotent."""
        if self._server is not None:
            self._server.cut()
            self._server = None

    async def close(self, grace_s: float) -> None:
        """Takes no more callers; calls in flight have so long to end. Idempotent."""
        if self._server is not None:
            await self._run(self._server.stop(grace_s), timeout_s=grace_s + _TURN_TIMEOUT_S)

    async def _run(self, coroutine: Coroutine[Any, Any, None], *, timeout_s: float) -> None:
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._event_loop)
        except RuntimeError:  # the device's thread has ended
            coroutine.close()
            return
        with contextlib.suppress(TimeoutError):  # it hangs
            await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
