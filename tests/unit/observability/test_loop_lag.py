"""The lag of an event loop is what other work holds up its timers by."""

from __future__ import annotations

import asyncio
import time

from specdec.observability.loop_lag import INTERVAL_S, watch_loop_lag

BLOCKED_S = 2 * INTERVAL_S


async def test_a_blocked_event_loop_shows_as_lag() -> None:
    lags: asyncio.Queue[float] = asyncio.Queue()
    watching = asyncio.create_task(watch_loop_lag(lags.put_nowait))
    await asyncio.sleep(0)  # the watcher has set its timer
    time.sleep(BLOCKED_S)  # noqa: ASYNC251
    assert await lags.get() >= BLOCKED_S - 1.1 * INTERVAL_S
    watching.cancel()
