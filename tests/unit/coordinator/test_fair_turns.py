"""Tenants get turns one after another, and a turn that is given up goes to the next."""

from __future__ import annotations

import asyncio

from coordinator.text.fair_turns import FairTurns


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_turns_of_tenants_alternate_and_given_up_ones_are_passed_on() -> None:
    turns, order, gate = FairTurns(), list[str](), asyncio.Event()

    async def work(name: str) -> None:
        async with turns.of(name[0]):
            await gate.wait()
            order.append(name)

    tasks = {}
    for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
        tasks[name] = asyncio.create_task(work(name))
        await settled()
    tasks["a2"].cancel()
    tasks["a1"].cancel()
    tasks["b2"].cancel()
    await settled()
    gate.set()
    await asyncio.wait(tasks.values())
    assert order == ["b1", "c1", "a3", "a4"]
    async with turns.of("d"):
        pass


async def test_a_turn_that_comes_at_the_moment_of_a_cancellation_is_passed_on() -> None:
    turns = FairTurns()
    async with turns.of("a"):
        waiting = [asyncio.create_task(turns.of("b").__aenter__()) for _ in range(2)]
        await settled()
    waiting[0].cancel()
    await settled()
    assert waiting[0].cancelled()
    assert waiting[1].done()
