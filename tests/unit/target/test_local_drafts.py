"""Calls that bring a `local_draft`: drafted and verified in one call, and never worse than without where that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
import torch

from draft_service.proposer import Proposer
from specdec.contract.errors import KvMiss, StaleEpoch
from specdec.contract.types import (
    DrawRule,
    LocalDraft,
    ProposeRequest,
    SamplingFilters,
    Verification,
    VerifyRequest,
)
from specdec.engine.base import StepPlan
from specdec.engine.drafting.drawing import Drawing
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.loop import draft_steps
from specdec.engine.loop.job import Job
from target_service.verifier import Verifier
from tests.support.round_driver import make_round
from tests.support.table_worker import TableWorker

TOKENS = [3 + index * 7 % 20 for index in range(100)]
NO_DRAFT = np.empty(0, dtype=np.uint32)
LOCAL = {"early-exit": 1, "longer": 2}
GAMMA = 4


class FaultyDrafts(TableWorker):
    """Draft steps may fail, or wait; full ones go well."""

    def __init__(self) -> None:
        super().__init__(local_drafts=LOCAL)
        self.fail_drafts: BaseException | None = None
        self.spoilt_after = -1
        """Draft index from which draft steps give no number."""

    def execute(self, plan: StepPlan) -> torch.Tensor:
        logits = super().execute(plan)
        if plan.local_draft and self.fail_drafts is not None:
            raise self.fail_drafts
        if plan.local_draft and 0 <= self.spoilt_after <= plan.slices[0].draft_index:
            logits[:] = float("nan")
        return logits

    @property
    def draft_plans(self) -> list[StepPlan]:
        return [plan for plan in self.steps if plan.local_draft]


@pytest.fixture
def worker() -> FaultyDrafts:
    return FaultyDrafts()


@pytest.fixture
async def verifier(worker: FaultyDrafts) -> AsyncIterator[Verifier]:
    verifier = Verifier(worker)
    yield verifier
    verifier.check_integrity()
    await verifier.close()


def asked(
    length: int, *, start: int = 0, gamma: int = GAMMA, pool: str = "early-exit", round_id: int = 1, **position: object
) -> VerifyRequest:
    """A call of a session of `length` tokens."""
    at = make_round(TOKENS[:length], start=start, round_id=round_id, **position)
    return VerifyRequest(at, NO_DRAFT, (), local_draft=LocalDraft(pool, gamma))


async def begun(verifier: Verifier, length: int = 20, **position: object) -> None:
    """A session's first round: afterwards all its tokens but the next one have run."""
    answer = await verifier.verify(asked(length, round_id=0, **position))
    assert answer.drafted is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draw_rule", [DrawRule.DISTRIBUTION, DrawRule.COUPLED])
async def test_a_local_draft_is_what_a_draft_replica_of_that_model_would_draft(
    verifier: Verifier, temperature: float, draw_rule: DrawRule
) -> None:
    """Token for token, support for support: one place says what q was."""
    position = {"filters": SamplingFilters(temperature=temperature, top_k=9), "seed": 7, "draw_rule": draw_rule}
    await begun(verifier, **position)
    answer = await verifier.verify(asked(21, start=20, **position))
    proposer = Proposer(TableWorker(salt=LOCAL["early-exit"]))
    proposal = await proposer.propose(ProposeRequest(make_round(TOKENS[:21], **position), GAMMA))
    await proposer.close()
    drafted = answer.drafted
    assert drafted is not None
    assert drafted.draft_token_ids.tolist() == proposal.draft_token_ids.tolist()
    assert len(drafted.draft_token_ids) == GAMMA
    for ours, theirs in zip(drafted.supports, proposal.supports, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.weights.tolist() == theirs.weights.tolist()
    assert drafted.lost_mass == proposal.lost_mass


async def test_it_is_verified_as_if_the_call_had_brought_it(verifier: Verifier) -> None:
    position = {"filters": SamplingFilters(), "seed": 3}
    await begun(verifier, **position)
    answer = await verifier.verify(asked(21, start=20, **position))
    assert answer.drafted is not None
    brought = await verifier.verify(
        VerifyRequest(
            make_round(TOKENS[:21], session_id="other", **position),
            answer.drafted.draft_token_ids,
            [support.token_ids for support in answer.drafted.supports],
        )
    )
    assert [row.weights.tolist() for row in answer.rows] == [row.weights.tolist() for row in brought.rows]
    assert [row.tail_token_id for row in answer.rows] == [row.tail_token_id for row in brought.rows]
    assert answer.kv_len == brought.kv_len == 21 + GAMMA


async def test_a_session_that_has_more_to_run_than_its_last_token_is_verified_without_a_draft(
    verifier: Verifier, worker: FaultyDrafts
) -> None:
    await begun(verifier)
    answer = await verifier.verify(asked(23, start=20))
    assert answer.drafted is None
    assert not worker.draft_plans


@pytest.mark.parametrize("pool", ["shorter", ""])
async def test_a_draft_that_is_not_here_is_no_error(verifier: Verifier, worker: FaultyDrafts, pool: str) -> None:
    await begun(verifier)
    answer = await verifier.verify(asked(21, start=20, pool=pool))
    assert answer.drafted is None
    assert len(answer.choice_token_ids) == 1
    assert not worker.draft_plans


async def test_a_gamma_above_the_limit_is_cut(verifier: Verifier) -> None:
    """Another target may take more, and a round that goes on here must not fail for that."""
    await begun(verifier)
    answer = await verifier.verify(asked(21, start=20, gamma=40))
    assert answer.drafted is not None
    assert len(answer.drafted.draft_token_ids) == 16


async def test_where_the_context_ends_the_draft_ends() -> None:
    verifier = Verifier(TableWorker(local_drafts=LOCAL, context=23))
    await begun(verifier)
    answer = await verifier.verify(asked(21, start=20))
    assert answer.drafted is not None
    assert len(answer.drafted.draft_token_ids) == 2
    answer = await verifier.verify(asked(23, start=21, round_id=2))
    assert answer.drafted is None
    await verifier.close()


async def test_a_draft_has_no_more_tokens_than_it_can_have_whatever_is_asked_for() -> None:
    verifier = Verifier(TableWorker(local_drafts=LOCAL, local_gammas=tuple(2 for _ in LOCAL)))
    await begun(verifier)
    answer = await verifier.verify(asked(21, start=20))
    assert answer.drafted is not None
    assert len(answer.drafted.draft_token_ids) == 2
    await verifier.close()


async def test_a_draft_ends_with_an_end_token(verifier: Verifier) -> None:
    await begun(verifier)
    whole = await verifier.verify(asked(21, start=20))
    assert whole.drafted is not None
    end = int(whole.drafted.draft_token_ids[1])
    filters = SamplingFilters(temperature=0.0, end_token_ids=(end,))
    ended = await verifier.verify(asked(21, start=20, round_id=2, filters=filters))
    assert ended.drafted is not None
    assert ended.drafted.draft_token_ids.tolist() == whole.drafted.draft_token_ids[:2].tolist()


@pytest.mark.parametrize("error", [RuntimeError("boom"), torch.OutOfMemoryError("out of memory")])
async def test_a_draft_step_that_fails_costs_the_draft_and_not_the_call(
    verifier: Verifier, worker: FaultyDrafts, error: Exception
) -> None:
    await begun(verifier)
    worker.fail_drafts = error
    answer = await verifier.verify(asked(21, start=20))
    assert answer.drafted is None
    assert answer.choice_token_ids.tolist() == worker.greedy_continuation(TOKENS[:21], 1)
    worker.fail_drafts = None
    again = await verifier.verify(asked(22, start=21, round_id=2))
    assert again.drafted is not None


async def test_a_draft_that_stops_being_numbers_ends_there(verifier: Verifier, worker: FaultyDrafts) -> None:
    await begun(verifier)
    worker.spoilt_after = 2
    answer = await verifier.verify(asked(21, start=20))
    assert answer.drafted is not None
    assert len(answer.drafted.draft_token_ids) == 2
    assert len(answer.choice_token_ids) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_token_whose_drawing_fails_is_not_of_the_draft(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    filters = SamplingFilters(temperature=temperature)
    await begun(verifier, filters=filters)
    draw, num_draws = Drawing.draw, iter(range(100))

    def breaks_down(drawing: Drawing, jobs: Sequence[Job], logits: StepLogits) -> None:
        draw(drawing, jobs, logits)
        if next(num_draws) == 2:
            raise RuntimeError("boom")

    monkeypatch.setattr(Drawing, "draw", breaks_down)
    answer = await verifier.verify(asked(21, start=20, filters=filters))
    assert answer.drafted is not None
    assert len(answer.drafted.draft_token_ids) == 2
    assert len(answer.choice_token_ids) + len(answer.rows) == 3


async def test_the_same_call_again_is_answered_from_the_store(verifier: Verifier, worker: FaultyDrafts) -> None:
    await begun(verifier)
    first, joined = await asyncio.gather(verifier.verify(asked(21, start=20)), verifier.verify(asked(21, start=20)))
    num_steps = len(worker.steps)
    assert await verifier.verify(asked(21, start=20)) is first is joined
    assert len(worker.steps) == num_steps
    other = await verifier.verify(asked(21, start=20, gamma=GAMMA - 1))
    assert other.drafted is not None
    assert len(other.drafted.draft_token_ids) == GAMMA - 1


async def test_a_call_that_is_given_up_while_it_drafts_leaves_its_session_as_it_was(
    verifier: Verifier, worker: FaultyDrafts
) -> None:
    await begun(verifier)
    worker.gate.clear()
    given_up = asyncio.create_task(verifier.verify(asked(21, start=20)))
    while not worker.draft_plans:
        await asyncio.to_thread(worker.entered.acquire)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    worker.gate.set()
    answer = await verifier.verify(asked(21, start=20, round_id=2))
    assert answer.num_cached_tokens == 20
    assert answer.drafted is not None
    assert answer.choice_token_ids[0] == worker.greedy_continuation(TOKENS[:21], 1)[0]


async def test_a_newer_call_supersedes_one_that_drafts(verifier: Verifier, worker: FaultyDrafts) -> None:
    await begun(verifier)
    worker.gate.clear()
    older = asyncio.create_task(verifier.verify(asked(21, start=20)))
    while not worker.draft_plans:
        await asyncio.to_thread(worker.entered.acquire)
    newer = asyncio.create_task(verifier.verify(asked(21, start=20, round_id=2, gamma=2)))
    await asyncio.sleep(0)
    worker.gate.set()
    with pytest.raises(StaleEpoch):
        await older
    answer: Verification = await newer
    assert answer.drafted is not None
    assert len(answer.drafted.draft_token_ids) == 2


async def test_a_call_of_a_session_that_is_not_here_misses(verifier: Verifier) -> None:
    with pytest.raises(KvMiss):
        await verifier.verify(asked(21, start=20))


async def test_calls_of_several_sessions_draft_in_the_same_steps(verifier: Verifier, worker: FaultyDrafts) -> None:
    ids = ["a", "b", "c"]
    for name in ids:
        await begun(verifier, session_id=name)
    worker.gate.clear()
    before = asyncio.create_task(verifier.verify(VerifyRequest(make_round(TOKENS[:5]), NO_DRAFT, ())))
    num_steps = len(worker.steps)
    while len(worker.steps) == num_steps:
        await asyncio.to_thread(worker.entered.acquire)
    calls = [asyncio.create_task(verifier.verify(asked(21, start=20, session_id=name))) for name in ids]
    await asyncio.sleep(0)
    worker.gate.set()
    await before
    answers = await asyncio.gather(*calls)
    assert all(answer.drafted is not None and len(answer.drafted.draft_token_ids) == GAMMA for answer in answers)
    assert [len(plan.slices) for plan in worker.draft_plans] == [3] * GAMMA
    assert len(worker.steps[-1].slices) == 3  # and are verified in one


async def test_calls_that_do_not_draft_wait_for_a_few_draft_steps_only(
    verifier: Verifier, worker: FaultyDrafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_steps, "MOST_IN_A_ROW", 2)
    await begun(verifier, session_id="drafts")
    worker.gate.clear()
    before = asyncio.create_task(verifier.verify(VerifyRequest(make_round(TOKENS[:5]), NO_DRAFT, ())))
    num_steps = len(worker.steps)
    while len(worker.steps) == num_steps:
        await asyncio.to_thread(worker.entered.acquire)
    drafting = asyncio.create_task(verifier.verify(asked(21, start=20, session_id="drafts")))
    plain = asyncio.create_task(
        verifier.verify(VerifyRequest(make_round(TOKENS[:9], session_id="plain"), NO_DRAFT, ()))
    )
    await asyncio.sleep(0)
    worker.gate.set()
    await asyncio.gather(before, drafting, plain)
    kinds = [bool(plan.local_draft) for plan in worker.steps[num_steps + 1 :]]
    assert kinds == [True, True, False, True, True, False]
