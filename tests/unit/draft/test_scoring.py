"""Scores: q of committed tokens as the draft would have drawn them, at nobody's cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from coordinator.replicas.replica import DRAFT
from draft_service.proposer import Proposer
from specdec.contract.errors import InvalidRequest, ResourceExhausted
from specdec.contract.types import DrawRule, Proposal, ProposeRequest, SamplingFilters, ScoreRequest
from tests.support.round_driver import make_round
from tests.support.table_services import linked
from tests.support.table_worker import TableWorker

TOKENS = [3 + index * 7 % 20 for index in range(60)]
SAMPLED = SamplingFilters(temperature=0.8, top_k=9, top_p=0.9, repetition_penalty=1.2)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def worker() -> TableWorker:
    return TableWorker(salt=1)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def proposer(worker: TableWorker, clock: Clock) -> AsyncIterator[Proposer]:
    engine = Proposer(worker, clock=clock)
    yield engine
    engine.check_integrity()
    await engine.close()


def scored(tokens: list[int], num_scored: int, **options: object) -> ScoreRequest:
    asked = make_round(tokens[:-num_scored], session_id="s", output_start=30, **options)  # type: ignore[arg-type]
    return ScoreRequest(asked, np.array(tokens[-num_scored:], dtype=np.uint32))


async def draft(proposer: Proposer, clock: Clock, **options: object) -> Proposal:
    """Eight tokens after the first 40, drawn; then the session is not expected back any more."""
    asked = make_round(TOKENS[:40], session_id="s", output_start=30, **options)  # type: ignore[arg-type]
    proposal = await proposer.propose(ProposeRequest(asked, 8))
    clock.now_s += 10.0
    return proposal


async def test_q_is_the_weight_that_each_token_would_have_been_drawn_with(proposer: Proposer, clock: Clock) -> None:
    proposal = await draft(proposer, clock, filters=SAMPLED, seed=7)
    tokens = proposal.draft_token_ids.tolist()
    drawn_with = [
        float(support.weights[support.token_ids == token_id].sum()) / float(support.weights.sum(dtype=np.int64))
        for token_id, support in zip(tokens, proposal.supports, strict=True)
    ]
    score = await proposer.score(scored([*TOKENS[:40], *tokens], len(tokens), filters=SAMPLED, seed=7))
    assert score.q == pytest.approx(drawn_with, rel=1e-12)
    # Negative control: the rows of one position on are other distributions.
    late = await proposer.score(scored([*TOKENS[:40], *tokens], len(tokens) - 1, filters=SAMPLED, seed=7))
    assert late.q == pytest.approx(drawn_with[1:], rel=1e-12)
    assert late.q != pytest.approx(drawn_with[:-1], rel=1e-2)


@pytest.mark.parametrize(
    ("filters", "draw_rule"),
    [(SamplingFilters(temperature=0.0), DrawRule.DISTRIBUTION), (SAMPLED, DrawRule.COUPLED)],
    ids=["greedy", "coupled"],
)
async def test_where_choices_travel_it_says_which_tokens_are_the_drafts_own(
    proposer: Proposer, clock: Clock, filters: SamplingFilters, draw_rule: DrawRule
) -> None:
    options = {"filters": filters, "draw_rule": draw_rule, "seed": 3}
    tokens = [*TOKENS[:40], *(await draft(proposer, clock, **options)).draft_token_ids.tolist()]
    assert (await proposer.score(scored(tokens, 8, **options))).q == (1.0,) * 8
    tokens[-1] = 2 + (tokens[-1] + 1) % 20
    assert (await proposer.score(scored(tokens, 8, **options))).q == (1.0,) * 7 + (0.0,)


async def test_a_score_leaves_nothing_behind_and_takes_no_session_its_kv(
    proposer: Proposer, worker: TableWorker, clock: Clock
) -> None:
    await draft(proposer, clock)
    num_held = proposer.stats().num_held_kv_blocks
    for _ in range(3):
        await proposer.score(scored(TOKENS, 20))
    await proposer.release([])  # by now the last one's session has been released
    assert (proposer.info().num_sessions, proposer.stats().num_held_kv_blocks) == (1, num_held)
    again = await proposer.propose(
        ProposeRequest(make_round(TOKENS[:40], session_id="s", round_id=1, output_start=30), 8)
    )
    assert again.num_cached_tokens == 39


async def test_a_proposal_that_comes_while_tokens_are_scored_runs_in_the_next_step(
    proposer: Proposer, worker: TableWorker
) -> None:
    worker.gate.clear()
    scoring = asyncio.create_task(proposer.score(scored(TOKENS, 20)))
    await asyncio.to_thread(worker.entered.acquire)  # its first step, of the several that it needs
    proposing = asyncio.create_task(proposer.propose(ProposeRequest(make_round(TOKENS[:5], session_id="p"), 2)))
    await asyncio.sleep(0.05)
    worker.gate.set()
    with pytest.raises(ResourceExhausted) as caught:
        await scoring
    assert caught.value.reason == "REPLICA_BUSY"
    await proposing
    steps = [part.token_ids for plan in worker.steps for part in plan.slices]
    assert len(steps) == 3
    assert steps[0] == tuple(TOKENS[:16])
    assert steps[1] == tuple(TOKENS[:5])


async def test_where_somebody_is_drafted_for_or_expected_back_nothing_is_scored(
    proposer: Proposer, worker: TableWorker, clock: Clock
) -> None:
    worker.gate.clear()
    asked = make_round(TOKENS[:5], session_id="p")
    proposing = asyncio.create_task(proposer.propose(ProposeRequest(asked, 2)))
    await asyncio.to_thread(worker.entered.acquire)
    refused = asyncio.create_task(proposer.score(scored(TOKENS, 20)))
    await asyncio.sleep(0.05)
    worker.gate.set()
    for attempt in (refused, proposing_then_score(proposing, proposer)):
        with pytest.raises(ResourceExhausted) as caught:
            await attempt
        assert caught.value.reason == "REPLICA_BUSY"
    clock.now_s += 10.0
    assert len((await proposer.score(scored(TOKENS, 20))).q) == 20


async def proposing_then_score(proposing: asyncio.Task[Proposal], proposer: Proposer) -> None:
    await proposing
    await proposer.score(scored(TOKENS, 20))


async def test_a_link_asks_for_scores_and_hears_when_the_replica_is_needed(worker: TableWorker, clock: Clock) -> None:
    proposer = Proposer(worker, clock=clock)
    async with linked(DRAFT, proposer) as link:
        expected = await proposer.score(scored(TOKENS, 20, filters=SAMPLED))
        score = await link.score(scored(TOKENS, 20, filters=SAMPLED))
        assert score.q == pytest.approx(expected.q, rel=1e-6)
        assert any(score.q)
        await link.propose(ProposeRequest(make_round(TOKENS[:5], session_id="p"), 2))
        with pytest.raises(ResourceExhausted) as caught:
            await link.score(scored(TOKENS, 20))
        assert caught.value.reason == "REPLICA_BUSY"
        with pytest.raises(InvalidRequest):
            await link.score(ScoreRequest(make_round(TOKENS), np.array([999], dtype=np.uint32)))
    await proposer.close()
