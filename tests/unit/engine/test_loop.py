"""The device thread on a program of its own: superseding, cancelling, crashing, sharing steps, closing.

What real and simulated engines have in common is in tests/contract/test_engine_calls.py.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from specdec.contract.errors import Internal, StaleEpoch, Unavailable
from specdec.contract.types import ProposeRequest
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.loop.device_loop import EngineLoop
from specdec.engine.loop.job import Job
from specdec.engine.sessions.calls import Call, identity_of
from tests.support.round_driver import make_round
from tests.support.table_worker import TableWorker

TOKENS = [3 + index * 7 % 20 for index in range(100)]
NO_TOKENS = np.empty(0, dtype=np.uint32)


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    kv_len: int
    num_cached_tokens: int


class GreedyProgram:
    """Goes on with the likeliest token until the job has as much KV as its call may need."""

    def advance(self, jobs: Sequence[Job], logits: StepLogits) -> None:
        for job, token_id in zip(jobs, logits.top_ids, strict=True):
            job.progress = [*(job.progress or ()), token_id]
            if job.kv_len < job.call.max_kv_len:
                job.append(token_id)
            else:
                job.finish(Answer(job.progress, job.kv_len, job.num_cached_tokens))


class IdleProgram:
    """Broken: neither goes on nor finishes."""

    def advance(self, jobs: Sequence[Job], logits: StepLogits) -> None:
        pass


def _call(tokens: Sequence[int], *, num_tokens: int = 1, **position: Any) -> Call:
    """Asks for the `num_tokens` tokens that follow `tokens`."""
    request = ProposeRequest(make_round(tokens, **position), num_tokens)
    return Call(request, identity_of(request), NO_TOKENS, num_logit_rows=1, max_kv_len=len(tokens) + num_tokens - 1)


class _Held:
    """A loop whose steps wait until they are let go."""

    def __init__(self, *, max_step_tokens: int = 512, program: Any = None, **options: Any) -> None:
        self.worker = TableWorker(**options)
        self.loop = EngineLoop(self.worker, program or GreedyProgram(), max_step_tokens=max_step_tokens)

    async def start(self, call: Call) -> asyncio.Task[Answer]:
        """Begins a call whose first step is then being carried out."""
        self.worker.gate.clear()
        task = asyncio.create_task(self.loop.call(call))
        await asyncio.to_thread(self.worker.entered.acquire)
        return task

    async def queue(self, call: Call) -> asyncio.Task[Answer]:
        """Begins a call while a step is held."""
        task = asyncio.create_task(self.loop.call(call))
        await asyncio.sleep(0)  # lets it put itself into the inbox
        return task

    def let_go(self) -> None:
        self.worker.gate.set()

    async def close(self) -> None:
        self.let_go()
        await self.loop.close()
        self.loop.check_integrity()


@pytest.fixture
async def held():
    engine = _Held()
    yield engine
    await engine.close()


@pytest.mark.parametrize("key", [{"epoch": 1, "round_id": 2}, {"epoch": 2, "round_id": 0}])
async def test_a_newer_call_waits_for_the_step_and_takes_the_session_over(key):
    held = _Held(max_step_tokens=32)
    first = await held.start(_call(TOKENS[:90], round_id=1))
    second = await held.queue(_call(TOKENS[:91], **key))
    held.let_go()
    with pytest.raises(StaleEpoch):
        await first
    answer = await second
    assert answer.num_cached_tokens == 32  # the superseded call's first chunk
    assert answer.token_ids == held.worker.greedy_continuation(TOKENS[:91], 1)
    await held.close()


async def test_a_cancelled_call_stops_and_leaves_its_kv_usable():
    held = _Held(max_step_tokens=32)
    first = await held.start(_call(TOKENS[:90], round_id=1))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    held.let_go()
    again = await held.loop.call(_call(TOKENS[:90], round_id=1))
    assert again.num_cached_tokens == 32
    assert again.token_ids == held.worker.greedy_continuation(TOKENS[:90], 1)
    assert len(held.worker.steps) == 3
    await held.close()


async def test_a_call_cancelled_before_it_is_admitted_never_runs(held):
    first = await held.start(_call(TOKENS[:20], session_id="a"))
    second = await held.queue(_call(TOKENS[:20], session_id="b"))
    second.cancel()
    held.let_go()
    await first
    await held.loop.call(_call(TOKENS[:20], session_id="c"))
    assert len(held.worker.steps) == 2
    assert held.loop.load().num_sessions == 2


async def test_a_crash_fails_the_calls_of_its_step_and_the_engine_goes_on(held):
    await held.loop.call(_call(TOKENS[:20], session_id="a", round_id=1))
    held.worker.fail_next = RuntimeError("the device failed")
    with pytest.raises(Internal):
        await held.loop.call(_call([*TOKENS[:20], 5], session_id="a", round_id=2, start=20))
    assert held.loop.load().num_sessions == 0
    again = await held.loop.call(_call([*TOKENS[:20], 5], session_id="a", round_id=2))
    assert again.token_ids == held.worker.greedy_continuation([*TOKENS[:20], 5], 1)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        ValueError("broken"),
    ],
)
async def test_a_device_on_which_every_step_fails_ends_the_engine(held, error):
    await held.loop.call(_call(TOKENS[:20]))
    held.worker.fail_always = error
    outcomes = []
    for round_id in range(1, 4):
        try:
            await held.loop.call(_call(TOKENS[:20], round_id=round_id))
        except (Internal, Unavailable) as failure:
            outcomes.append((failure.reason, str(error) in failure.message))
    num_failed_steps = 1 if isinstance(error, RuntimeError) else 3
    assert outcomes[num_failed_steps - 1] == ("REPLICA_UNAVAILABLE", True)
    with pytest.raises(Internal, match=f"the device failed permanently.*{re.escape(str(error))}"):
        await held.loop.wait_ended()
    assert len(held.worker.steps) == 1 + num_failed_steps + 1


async def test_a_device_on_which_longer_steps_fail_ends_the_engine_though_a_token_alone_goes_well(held):
    held.worker.fail_always, held.worker.fail_from_tokens = RuntimeError("could not create a primitive"), 2
    first, second = (_call(TOKENS[:count], session_id=f"long-{count}") for count in (40, 3))
    for index in range(3):
        held.worker.entered = threading.Semaphore(0)
        short = await held.start(_call([6], session_id=f"short-{index}"))
        long = [await held.queue(call) for call in (first, second)]
        held.let_go()
        await short
        for failing in long:
            with pytest.raises((Internal, Unavailable)):
                await failing
    async with asyncio.timeout(20):
        with pytest.raises(Internal, match=r"the device failed permanently.*could not create a primitive"):
            await held.loop.wait_ended()
    # The step that failed once more: as many sequences, none longer than a block, no block of two.
    slices = held.worker.steps[-1].slices
    assert [part.token_ids for part in slices] == [(0,) * 3, (0,) * 16]
    assert [(part.start, part.num_logit_rows, len(part.block_table)) for part in slices] == [(0, 1, 1)] * 2


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        MemoryError(),
    ],
)
async def test_memory_that_is_short_in_every_step_does_not_end_the_engine(held, error):
    held.worker.fail_always = error
    for round_id in range(8):
        with pytest.raises(Internal):
            await held.loop.call(_call(TOKENS[:20], round_id=round_id))
    held.worker.fail_always = None
    assert (await held.loop.call(_call(TOKENS[:20], round_id=8))).kv_len == 20


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: invalid argument"), ValueError("broken")])
async def test_a_request_whose_every_step_fails_does_not_end_the_engine(held, error):
    for round_id in range(8):
        held.worker.fail_next = error
        with pytest.raises(Internal):
            await held.loop.call(_call(TOKENS[:20], session_id="bad", round_id=round_id))
    good = await held.loop.call(_call(TOKENS[:30], session_id="good"))
    assert good.token_ids == held.worker.greedy_continuation(TOKENS[:30], 1)


async def test_a_crash_spares_the_sessions_that_were_not_in_the_step(held):
    await held.loop.call(_call(TOKENS[:20], session_id="a", round_id=1))
    held.worker.fail_next = RuntimeError("the device failed")
    with pytest.raises(Internal):
        await held.loop.call(_call(TOKENS[:30], session_id="b"))
    spared = await held.loop.call(_call([*TOKENS[:20], 5], session_id="a", round_id=2, start=20))
    assert spared.num_cached_tokens == 20


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
async def test_logits_that_are_no_distribution_fail_their_own_session_alone(held, value):
    held.worker.non_finite = {23: value}
    first = await held.start(_call(TOKENS[:20], session_id="first"))
    good = await held.queue(_call(TOKENS[:9], session_id="good"))
    bad = await held.queue(_call([5, 23], session_id="bad"))
    last = await held.queue(_call(TOKENS[:7], session_id="last"))
    held.let_go()
    with pytest.raises(Internal, match="non-finite logits"):
        await bad
    await first
    assert (await good).token_ids == held.worker.greedy_continuation(TOKENS[:9], 1)
    assert (await last).token_ids == held.worker.greedy_continuation(TOKENS[:7], 1)
    assert [len(plan.slices) for plan in held.worker.steps] == [1, 3]
    assert held.loop.load().num_sessions == 3


async def test_a_program_that_neither_finishes_nor_goes_on_fails_its_call():
    held = _Held(program=IdleProgram())
    with pytest.raises(Internal):
        await held.loop.call(_call(TOKENS[:20]))
    assert held.loop.load().num_sessions == 0
    await held.close()


async def test_jobs_that_go_on_share_their_steps_until_each_is_done(held):
    first = await held.start(_call(TOKENS[:20], session_id="first"))
    long = await held.queue(_call(TOKENS[:9], session_id="long", num_tokens=4))
    short = await held.queue(_call(TOKENS[:7], session_id="short", num_tokens=2))
    held.let_go()
    await first
    assert (await long).token_ids == held.worker.greedy_continuation(TOKENS[:9], 4)
    assert (await short).token_ids == held.worker.greedy_continuation(TOKENS[:7], 2)
    assert [len(plan.slices) for plan in held.worker.steps] == [1, 2, 2, 1, 1]
    assert (await long).kv_len == 12


async def test_blocks_are_shared_only_once_logits_that_follow_them_were_good():
    held = _Held(max_step_tokens=32)
    held.worker.non_finite = {23: np.nan}
    with pytest.raises(Internal):
        await held.loop.call(_call([*TOKENS[:64], 23], session_id="bad"))
    assert (await held.loop.call(_call(TOKENS[:64], session_id="a"))).num_cached_tokens == 0
    assert (await held.loop.call(_call(TOKENS[:64], session_id="b"))).num_cached_tokens == 48
    await held.close()


async def test_calls_of_many_sessions_that_arrive_together_share_a_step(held):
    first = await held.start(_call(TOKENS[:20], session_id="first"))
    others = [await held.queue(_call(TOKENS[index : index + 9], session_id=f"s{index}")) for index in range(8)]
    held.let_go()
    await asyncio.gather(first, *others)
    assert [len(plan.slices) for plan in held.worker.steps] == [1, 8]


async def test_closing_finishes_what_is_in_flight_and_refuses_what_is_new(held):
    first = await held.start(_call(TOKENS[:20], session_id="a"))
    closing = asyncio.create_task(held.loop.close())
    await asyncio.sleep(0)
    assert held.loop.load().draining
    with pytest.raises(Unavailable) as refusal:
        await held.loop.call(_call(TOKENS[:20], session_id="b"))
    assert refusal.value.reason == "DRAINING"
    held.let_go()
    assert (await first).kv_len == 20
    await closing
    await held.loop.close()
    assert held.loop.stats().num_held_kv_blocks == 0


async def test_nobody_waits_for_ever_when_the_device_thread_itself_ends(held):
    held.worker.fail_next = GeneratorExit("no ordinary error")
    with pytest.raises(Internal):
        await held.loop.call(_call(TOKENS[:20]))
    with pytest.raises(Unavailable):
        await held.loop.call(_call(TOKENS[:20]))
    assert held.loop.load().draining
    with pytest.raises(Internal, match="broke down: GeneratorExit"):
        await held.loop.wait_ended()


async def test_an_engine_that_is_closed_ends_well(held):
    ended = asyncio.create_task(held.loop.wait_ended())
    await held.loop.close()
    await ended


async def test_an_idle_device_thread_sleeps(held):
    first = await held.start(_call(TOKENS[:20], num_tokens=2))
    first.cancel()
    held.let_go()
    await asyncio.gather(*(held.loop.release([f"s{index}"]) for index in range(200)))
    await asyncio.sleep(0.1)
    began_s = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - began_s < 0.25


async def test_an_idle_engine_runs_no_steps(held):
    await held.loop.call(_call(TOKENS[:20]))
    await held.loop.release([])
    assert len(held.worker.steps) == 1
