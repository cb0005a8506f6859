"""Turns of rounds: order of arrival, the limit, pauses, and cancelled rounds."""

from __future__ import annotations

import asyncio
import time

from coordinator.admission.shares import RoundTurns


class Limits:
    """Numbers of turns by tenant; a tenant without one needs no turn."""

    def __init__(self, **turns: int) -> None:
        self.turns = turns
        self.pause_share = 0.0

    def make(self) -> RoundTurns:
        return RoundTurns(self.turns.get, lambda: self.pause_share)


async def waiting(turns: RoundTurns, tenant: str = "flood") -> asyncio.Task[float | None]:
    task = asyncio.create_task(turns.begin(tenant))
    await settled()
    return task


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_rounds_beyond_the_limit_wait_in_order_of_arrival() -> None:
    turns = Limits(flood=2).make()
    running = [await turns.begin("flood") for _ in range(2)]
    tasks = [await waiting(turns) for _ in range(3)]
    assert not any(task.done() for task in tasks)
    for number in range(3):
        began_s = running.pop(0)
        assert began_s is not None
        turns.end(began_s)
        await settled()
        assert [task.done() for task in tasks] == [index <= number for index in range(3)]
        running.append(tasks[number].result())


async def test_a_tenant_below_its_share_does_not_wait() -> None:
    turns = Limits(flood=1).make()
    await turns.begin("flood")
    assert not (await waiting(turns)).done()
    assert await turns.begin("other") is None


async def test_all_rounds_run_once_turns_are_needed_no_longer() -> None:
    limits = Limits(flood=1)
    turns = limits.make()
    began_s = await turns.begin("flood")
    tasks = [await waiting(turns) for _ in range(4)]
    del limits.turns["flood"]
    assert began_s is not None
    turns.end(began_s)
    await settled()
    assert all(task.done() for task in tasks)


async def test_cancelled_rounds_keep_no_turn() -> None:
    turns = Limits(flood=1).make()
    began_s = await turns.begin("flood")
    cancelled, granted, last = [await waiting(turns) for _ in range(3)]
    cancelled.cancel()
    assert began_s is not None
    turns.end(began_s)  # passes over the cancelled round, whose task has not run since
    granted.cancel()  # after the turn was given to it, before it could take it
    await asyncio.wait([cancelled, granted])
    assert (cancelled.cancelled(), granted.cancelled()) == (True, True)
    await settled()
    assert last.done()


async def test_a_turn_pauses_for_its_share_of_the_rounds_duration() -> None:
    limits = Limits(flood=1)
    turns = limits.make()
    limits.pause_share = 1.0
    began_s = await turns.begin("flood")
    task = await waiting(turns)
    assert began_s is not None
    ended_s = time.monotonic()
    turns.end(began_s - 0.05)  # a round of at least 50 ms
    await task
    assert time.monotonic() - ended_s >= 0.05
