"""A coordinator without requests looks for changes less often, and at once when a request comes."""

from __future__ import annotations

import asyncio
import math

import pytest

from coordinator.replicas.store_watch import IDLE_AFTER_S, IDLE_FACTOR, Activity
from specdec.rpc.ticks import tick, until_tick_s
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def wakes() -> list[bool]:
    return []


@pytest.fixture
async def activity(clock: Clock, wakes: list[bool]) -> Activity:
    return Activity(lambda: wakes.append(True), clock=clock)


async def test_it_is_idle_some_time_after_the_last_request_and_never_while_one_runs(
    activity: Activity, clock: Clock
) -> None:
    assert not activity.is_idle
    clock.now_s += IDLE_AFTER_S + 1
    assert activity.is_idle
    activity.begin()
    clock.now_s += 100 * IDLE_AFTER_S
    assert not activity.is_idle
    activity.end()
    assert not activity.is_idle
    clock.now_s += IDLE_AFTER_S + 1
    assert activity.is_idle


async def test_a_request_ends_the_long_pauses_of_an_idle_coordinator(
    activity: Activity, clock: Clock, wakes: list[bool]
) -> None:
    clock.now_s += IDLE_AFTER_S + 1
    pauses = [asyncio.create_task(activity.pause(1e6)) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert not any(pause.done() for pause in pauses)
    activity.begin()
    async with asyncio.timeout(60):
        await asyncio.gather(*pauses)
    activity.begin()
    assert wakes == [True]


async def test_pauses_end_by_themselves_and_are_longer_while_idle(activity: Activity, clock: Clock) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await activity.pause(0.01)
    clock.now_s += IDLE_AFTER_S + 1
    async with asyncio.timeout(60):
        for _ in range(3):
            await activity.pause(0.01)
    # The first of the long pauses may be short, the others are whole.
    assert loop.time() - began_s >= 2 * IDLE_FACTOR * 0.01


async def test_timers_of_one_interval_end_at_the_same_times() -> None:
    loop = asyncio.get_running_loop()
    for interval_s in (0.25, 1.0, 7.0):
        before_s = loop.time()
        left_s = until_tick_s(interval_s)
        latest_s = loop.time() + left_s
        assert 0 < left_s <= interval_s
        # A multiple of the interval lies between the bounds of the time at which the timer ends.
        assert math.floor(latest_s / interval_s + 1e-9) * interval_s >= before_s + left_s - 1e-6
    await tick(0.01)
