"""Measures how late the timers of an event loop are: the time for which other work holds it up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

#: Interval of the measurements.
INTERVAL_S = 0.5


async def watch_loop_lag(observe: Callable[[float], None]) -> None:
    """Report the lateness of a timer every `INTERVAL_S` until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        pause_s = INTERVAL_S - loop.time() % INTERVAL_S  # together with the other timers (`specdec.rpc.ticks`)
        due_s = loop.time() + pause_s
        await asyncio.sleep(pause_s)
        observe(max(0.0, loop.time() - due_s))
