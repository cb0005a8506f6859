"""The device thread: joining, superseding, cancelling, crashing, running out of blocks, closing."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
import torch

from draft_service.proposer import Proposer
from specdec.engine.logits import filters as laws
from specdec.engine.logits import rows as sampling
from specdec.engine.loop.replica import ReplicaOptions
from specdec.engine.sessions.table import DEFAULT_PIN_TTL_S, MAX_ANSWERS
from specdec.errors import Internal, KvMiss, ResourceExhausted, StaleEpoch, Unavailable
from specdec.types import DrawRule, ProposeRequest, SamplingFilters, VerifyRequest
from target_service.verifier import Verifier
from tests.support.round_driver import make_round
from tests.support.table_worker import TableWorker

TOKENS = [3 + index * 7 % 20 for index in range(100)]
NO_DRAFT = np.empty(0, dtype=np.uint32)


def _verify(tokens, **options) -> VerifyRequest:
    return VerifyRequest(make_round(tokens, **options), NO_DRAFT, ())


class _Held:
    """A verifier whose steps wait until they are let go."""

    def __init__(self, **options) -> None:
        max_step_tokens = options.pop("max_step_tokens", 512)
        self.worker = TableWorker(**options)
        self.verifier = Verifier(self.worker, ReplicaOptions(max_step_tokens=max_step_tokens))

    async def start(self, request: VerifyRequest) -> asyncio.Task:
        """Begins a call whose first step is then being carried out."""
        self.worker.gate.clear()
        task = asyncio.create_task(self.verifier.verify(request))
        await asyncio.to_thread(self.worker.entered.acquire)
        return task

    async def queue(self, request: VerifyRequest) -> asyncio.Task:
        """Begins a call while a step is held."""
        task = asyncio.create_task(self.verifier.verify(request))
        await asyncio.sleep(0)  # lets it put itself into the inbox
        return task

    def let_go(self) -> None:
        self.worker.gate.set()

    async def close(self) -> None:
        self.let_go()
        await self.verifier.close()
        self.verifier.check_integrity()


@pytest.fixture
async def held():
    engine = _Held()
    yield engine
    await engine.close()


async def test_a_duplicate_joins_the_call_in_flight(held):
    request = _verify(TOKENS[:20], round_id=1)
    first = await held.start(request)
    second = await held.queue(request)
    held.let_go()
    assert await first is await second
    assert len(held.worker.steps) == 1


async def test_cancelling_one_of_two_joined_calls_leaves_the_other(held):
    request = _verify(TOKENS[:20], round_id=1)
    first = await held.start(request)
    second = await held.queue(request)
    first.cancel()
    held.let_go()
    assert (await second).kv_len == 20
    with pytest.raises(asyncio.CancelledError):
        await first


@pytest.mark.parametrize("key", [{"epoch": 1, "round_id": 2}, {"epoch": 2, "round_id": 0}])
async def test_a_newer_call_waits_for_the_step_and_takes_the_session_over(key):
    held = _Held(max_step_tokens=32)
    first = await held.start(_verify(TOKENS[:90], round_id=1))
    second = await held.queue(_verify(TOKENS[:91], **key))
    held.let_go()
    with pytest.raises(StaleEpoch):
        await first
    answer = await second
    assert answer.num_cached_tokens == 32  # the superseded call's first chunk
    assert answer.choice_token_ids.tolist() == held.worker.greedy_continuation(TOKENS[:91], 1)
    await held.close()


async def test_an_older_call_is_refused_while_a_newer_one_runs(held):
    first = await held.start(_verify(TOKENS[:20], round_id=5))
    late = await held.queue(_verify(TOKENS[:19], round_id=4))
    held.let_go()
    with pytest.raises(StaleEpoch):
        await late
    await first


async def test_a_cancelled_call_stops_and_leaves_its_kv_usable():
    held = _Held(max_step_tokens=32)
    first = await held.start(_verify(TOKENS[:90], round_id=1))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    held.let_go()
    again = await held.verifier.verify(_verify(TOKENS[:90], round_id=1))
    assert again.num_cached_tokens == 32
    assert again.choice_token_ids.tolist() == held.worker.greedy_continuation(TOKENS[:90], 1)
    assert len(held.worker.steps) == 3
    await held.close()


async def test_a_call_cancelled_before_it_is_admitted_never_runs(held):
    first = await held.start(_verify(TOKENS[:20], session_id="a"))
    second = await held.queue(_verify(TOKENS[:20], session_id="b"))
    second.cancel()
    held.let_go()
    await first
    await held.verifier.verify(_verify(TOKENS[:20], session_id="c"))
    assert len(held.worker.steps) == 2
    assert held.verifier.info().num_sessions == 2


async def test_a_crash_fails_the_calls_of_its_step_and_the_engine_goes_on(held):
    await held.verifier.verify(_verify(TOKENS[:20], session_id="a", round_id=1))
    held.worker.fail_next = RuntimeError("the device failed")
    with pytest.raises(Internal):
        await held.verifier.verify(_verify([*TOKENS[:20], 5], session_id="a", round_id=2, start=20))
    assert held.verifier.info().num_sessions == 0
    again = await held.verifier.verify(_verify([*TOKENS[:20], 5], session_id="a", round_id=2))
    assert again.choice_token_ids.tolist() == held.worker.greedy_continuation([*TOKENS[:20], 5], 1)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: unspecified launch failure"), ValueError("broken")])
async def test_a_device_on_which_every_step_fails_ends_the_engine(held, error):
    await held.verifier.verify(_verify(TOKENS[:20]))
    held.worker.fail_always = error
    outcomes = []
    for round_id in range(1, 4):
        try:
            await held.verifier.verify(_verify(TOKENS[:20], round_id=round_id))
        except (Internal, Unavailable) as failure:
            outcomes.append((failure.reason, str(error) in failure.message))
    num_failed_steps = 1 if isinstance(error, RuntimeError) else 3
    assert outcomes[num_failed_steps - 1] == ("REPLICA_UNAVAILABLE", True)
    with pytest.raises(Internal, match=f"the device failed for good.*{error}"):
        await held.verifier.wait_ended()
    assert len(held.worker.steps) == 1 + num_failed_steps + 1


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
            await held.verifier.verify(_verify(TOKENS[:20], round_id=round_id))
    held.worker.fail_always = None
    assert (await held.verifier.verify(_verify(TOKENS[:20], round_id=8))).kv_len == 20


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: invalid argument"), ValueError("broken")])
async def test_a_request_whose_every_step_fails_does_not_end_the_engine(held, error):
    for round_id in range(8):
        held.worker.fail_next = error
        with pytest.raises(Internal):
            await held.verifier.verify(_verify(TOKENS[:20], session_id="bad", round_id=round_id))
    good = await held.verifier.verify(_verify(TOKENS[:30], session_id="good"))
    assert good.choice_token_ids.tolist() == held.worker.greedy_continuation(TOKENS[:30], 1)


async def test_a_crash_spares_the_sessions_that_were_not_in_the_step(held):
    await held.verifier.verify(_verify(TOKENS[:20], session_id="a", round_id=1))
    held.worker.fail_next = RuntimeError("the device failed")
    with pytest.raises(Internal):
        await held.verifier.verify(_verify(TOKENS[:30], session_id="b"))
    spared = await held.verifier.verify(_verify([*TOKENS[:20], 5], session_id="a", round_id=2, start=20))
    assert spared.num_cached_tokens == 20


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize(
    ("temperature", "draw_rule"), [(0.0, DrawRule.DISTRIBUTION), (1.0, DrawRule.DISTRIBUTION), (1.0, DrawRule.COUPLED)]
)
async def test_logits_that_are_no_law_fail_their_own_session_alone(held, value, temperature, draw_rule):
    held.worker.non_finite = {23: value}
    first = await held.start(_verify(TOKENS[:20], session_id="first"))
    good = await held.queue(_verify(TOKENS[:9], session_id="good"))
    options = {"filters": SamplingFilters(temperature=temperature), "draw_rule": draw_rule}
    bad = await held.queue(_verify([5, 23], session_id="bad", **options))
    last = await held.queue(_verify(TOKENS[:7], session_id="last"))
    held.let_go()
    with pytest.raises(Internal, match="no finite logits"):
        await bad
    await first
    assert (await good).choice_token_ids.tolist() == held.worker.greedy_continuation(TOKENS[:9], 1)
    assert (await last).choice_token_ids.tolist() == held.worker.greedy_continuation(TOKENS[:7], 1)
    assert [len(plan.slices) for plan in held.worker.steps] == [1, 3]
    assert held.verifier.info().num_sessions == 3


async def test_blocks_are_shared_only_once_logits_that_follow_them_were_good():
    held = _Held(max_step_tokens=32)
    held.worker.non_finite = {23: np.nan}
    with pytest.raises(Internal):
        await held.verifier.verify(_verify([*TOKENS[:64], 23], session_id="bad"))
    assert (await held.verifier.verify(_verify(TOKENS[:64], session_id="a"))).num_cached_tokens == 0
    assert (await held.verifier.verify(_verify(TOKENS[:64], session_id="b"))).num_cached_tokens == 48
    await held.close()


async def test_a_session_larger_than_the_pool_is_refused_by_name():
    held = _Held(num_blocks=2)
    with pytest.raises(ResourceExhausted) as refusal:
        await held.verifier.verify(_verify(TOKENS[:33]))
    assert refusal.value.reason == "KV_EXHAUSTED"
    assert held.verifier.info().kv_usage == 0.0
    await held.close()


async def test_a_call_waits_for_the_blocks_of_one_that_runs():
    held = _Held(num_blocks=4)
    first = await held.start(_verify(TOKENS[:50], session_id="a"))
    second = await held.queue(_verify([9, *TOKENS[:40]], session_id="b"))
    held.let_go()
    await first
    assert (await second).kv_len == 41
    await held.close()


async def _miss(verifier: Verifier, session_id: str, num_tokens: int) -> None:
    """Fills `num_tokens` of a session with KV, which a miss then pins."""
    await verifier.verify(_verify(TOKENS[:num_tokens], session_id=session_id, round_id=1))
    other = [*TOKENS[: num_tokens - 1], 2, 2, 2]
    with pytest.raises(KvMiss):
        await verifier.verify(_verify(other, session_id=session_id, round_id=2, start=num_tokens))


async def test_a_call_that_only_pins_keep_from_running_waits_for_their_end():
    passed_s = 0.0
    verifier = Verifier(worker := TableWorker(num_blocks=4), clock=lambda: time.monotonic() + passed_s)
    await _miss(verifier, "a", 50)
    passed_s = DEFAULT_PIN_TTL_S - 0.3
    # Nothing but the end of the pin wakes the engine.
    answer = await asyncio.wait_for(verifier.verify(_verify([9, *TOKENS[:40]], session_id="b")), 20.0)
    assert answer.choice_token_ids.tolist() == worker.greedy_continuation([9, *TOKENS[:40]], 1)
    verifier.check_integrity()
    await verifier.close()


async def test_the_resend_that_a_pin_is_for_ends_the_wait_for_it():
    verifier = Verifier(worker := TableWorker(num_blocks=4))
    await _miss(verifier, "a", 50)
    waiting = asyncio.create_task(verifier.verify(_verify([9, *TOKENS[:40]], session_id="b")))
    await verifier.release([])  # the engine has seen it by now
    assert not waiting.done()
    tokens = [*TOKENS[:49], 2, 2, 2]
    again = await verifier.verify(_verify(tokens, session_id="a", round_id=2, start=32))
    assert again.choice_token_ids.tolist() == worker.greedy_continuation(tokens, 1)
    assert (await waiting).choice_token_ids.tolist() == worker.greedy_continuation([9, *TOKENS[:40]], 1)
    verifier.check_integrity()
    await verifier.close()


async def test_calls_of_many_sessions_that_arrive_together_share_a_step(held):
    first = await held.start(_verify(TOKENS[:20], session_id="first"))
    others = [await held.queue(_verify(TOKENS[index : index + 9], session_id=f"s{index}")) for index in range(8)]
    held.let_go()
    await asyncio.gather(first, *others)
    assert [len(plan.slices) for plan in held.worker.steps] == [1, 8]


@pytest.mark.parametrize("draw_rule", [DrawRule.DISTRIBUTION, DrawRule.COUPLED])
@pytest.mark.parametrize("max_logits", [1, 4 * 24, 1 << 24])
async def test_a_step_of_many_rows_is_answered_in_batches_of_bounded_size(held, monkeypatch, max_logits, draw_rule):
    monkeypatch.setattr(laws, "MAX_BATCH_LOGITS", max_logits)
    sizes: list[int] = []
    make_laws = sampling.filtered_distributions
    monkeypatch.setattr(
        sampling,
        "filtered_distributions",
        lambda logits, contexts: sizes.append(len(logits)) or make_laws(logits, contexts),
    )
    first = await held.start(_verify(TOKENS[:20], session_id="first"))
    draft = np.array([4, 5], dtype=np.uint32)
    requests = [
        VerifyRequest(
            make_round(
                TOKENS[: 5 + n], session_id=f"s{n}", filters=SamplingFilters(top_p=0.9), seed=n, draw_rule=draw_rule
            ),
            draft[: n % 3],
            (draft[:1],) * (n % 3) if draw_rule is DrawRule.DISTRIBUTION else (),
            num_logprobs=2,
        )
        for n in range(6)
    ]
    together = [await held.queue(request) for request in requests]
    held.let_go()
    await first
    answers = await asyncio.gather(*together)
    assert sizes == {1: [1, 2, 3, 1, 2, 3], 96: [3, 4, 2, 3], 1 << 24: [12]}[max_logits]
    alone = Verifier(TableWorker())
    for request, answer in zip(requests, answers, strict=True):
        expected = await alone.verify(request)
        assert answer.choice_token_ids.tolist() == expected.choice_token_ids.tolist()
        assert [(row.weights.tolist(), row.tail_token_id) for row in answer.rows] == [
            (row.weights.tolist(), row.tail_token_id) for row in expected.rows
        ]
        assert [row.top_token_ids.tolist() for row in answer.logit_rows] == [
            row.top_token_ids.tolist() for row in expected.logit_rows
        ]
    await alone.close()


async def test_drafts_drawn_in_batches_are_those_drawn_together(monkeypatch):
    requests = [
        ProposeRequest(
            make_round(TOKENS[: 5 + n], session_id=f"s{n}", filters=SamplingFilters(temperature=n % 3), seed=n), 3
        )
        for n in range(7)
    ]

    async def draft() -> list[list[int]]:
        proposer = Proposer(TableWorker())
        proposals = await asyncio.gather(*(proposer.propose(request) for request in requests))
        await proposer.close()
        return [proposal.draft_token_ids.tolist() for proposal in proposals]

    together = await draft()
    monkeypatch.setattr(laws, "MAX_BATCH_LOGITS", 2 * 24)
    assert await draft() == together


async def test_a_call_in_flight_on_a_released_session_misses_and_may_be_sent_again():
    held = _Held(max_step_tokens=32)
    request = _verify(TOKENS[:90], round_id=1)
    first = await held.start(request)
    release = asyncio.create_task(held.verifier.release(["s"]))
    await asyncio.sleep(0)
    held.let_go()
    await release
    with pytest.raises(KvMiss) as miss:
        await first
    assert miss.value.have == 0
    assert held.verifier.info().num_sessions == 0
    again = await held.verifier.verify(request)
    assert again.choice_token_ids.tolist() == held.worker.greedy_continuation(TOKENS[:90], 1)
    await held.close()


async def test_closing_finishes_what_is_in_flight_and_refuses_what_is_new(held):
    first = await held.start(_verify(TOKENS[:20], session_id="a"))
    closing = asyncio.create_task(held.verifier.close())
    await asyncio.sleep(0)
    assert held.verifier.info().draining
    with pytest.raises(Unavailable) as refusal:
        await held.verifier.verify(_verify(TOKENS[:20], session_id="b"))
    assert refusal.value.reason == "DRAINING"
    held.let_go()
    assert (await first).kv_len == 20
    await closing
    await held.verifier.close()
    assert held.verifier.info().kv_usage == 0.0


async def test_nobody_waits_for_ever_when_the_device_thread_itself_ends(held):
    held.worker.fail_next = GeneratorExit("no ordinary error")
    with pytest.raises(Internal):
        await held.verifier.verify(_verify(TOKENS[:20]))
    with pytest.raises(Unavailable):
        await held.verifier.verify(_verify(TOKENS[:20]))
    assert held.verifier.info().draining
    with pytest.raises(Internal, match="broke down: GeneratorExit"):
        await held.verifier.wait_ended()


async def test_an_engine_that_is_closed_ends_well(held):
    ended = asyncio.create_task(held.verifier.wait_ended())
    await held.verifier.close()
    await ended


async def test_the_newest_answers_are_kept_for_repetition_and_older_ones_worked_out_again():
    verifier = Verifier(worker := TableWorker(num_blocks=MAX_ANSWERS + 8))
    requests = [_verify(TOKENS[:3], session_id=f"s{index}") for index in range(MAX_ANSWERS + 1)]
    answers = [await verifier.verify(request) for request in requests]
    num_steps = len(worker.steps)
    for index in (MAX_ANSWERS, 1):
        assert await verifier.verify(requests[index]) is answers[index]
    assert len(worker.steps) == num_steps
    again = await verifier.verify(requests[0])
    assert len(worker.steps) == num_steps + 1
    assert again.choice_token_ids.tolist() == answers[0].choice_token_ids.tolist()
    await verifier.close()


async def test_an_idle_engine_runs_no_steps(held):
    await held.verifier.verify(_verify(TOKENS[:20]))
    await held.verifier.release([])
    assert len(held.worker.steps) == 1
