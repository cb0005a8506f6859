"""A request changes its pool between two rounds only where the other pool is faster, by given times and scores.

Real replicas define the pools; their times and scores are given here, so that no test depends on a clock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial

import numpy as np
import pytest

from coordinator.requests import Provenance
from coordinator.round.acceptance import Acceptance
from coordinator.round.outcome import RoundOutcome
from coordinator.round.pool_stats import DraftPoolStats, PoolStatsTable, RoundTimes
from coordinator.round.request_router import WORTH_LEAVING, RequestRouter
from coordinator.round.routing_table import RoutingTable
from coordinator.round.session_tokens import SessionTokens
from coordinator.round.setting import RoundSetting
from coordinator.routing.expected_rounds import expected_rounds, rounds_of
from coordinator.routing.score_queue import MAX_WAITING, ScoreQueue, TokenSpan
from specdec.contract.types import MAX_SCORED_TOKENS, Mode, SamplingFilters, Score, ScoreRequest, Verification
from tests.support.coordinator_rig import Coordinator, Rig
from tests.support.round_driver import make_round
from tests.support.table_services import VOCABULARY, start_service

CLASS = "c"
PROMPT, SPAN = 40, MAX_SCORED_TOKENS
MUCH = 10_000

#: How much of a token's probability each pool has.
Q = {"a": 0.2, "b": 0.9}


class ToldScores(ScoreQueue):
    """Scores a span at once, from `Q`, without a call."""

    prefill_s = 0.0
    """Seconds of prefill per token."""

    def put(self, span: TokenSpan) -> None:
        num_tokens = span.request.position.committed_len + len(span.p)
        for pool in span.pools:
            score = Score((Q[pool],) * len(span.p), forward_s=self.prefill_s * num_tokens, step_s=0.001)
            span.on_scored(pool, score)
        span.on_end()


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    async with Rig(drafts=0) as rig:
        for pool in Q:
            rig.services.append(await start_service("draft", salt=1, pool=pool))
        yield await rig.coordinator(routes=True)


def record(of_pool: DraftPoolStats, alpha: float) -> None:
    """Let drafts of a pool have taken 1 ms per token, and their verification 20 ms."""
    for gamma in (1, 2, 4, 8) * 8:
        accepted = round(alpha * gamma)
        of_pool.observe(RoundTimes(gamma, accepted, 0.001 * gamma, 0.021, 0.02, 1, 1, 100, gamma, gamma + 1))


def round_of(pool: str, num_draft_tokens: int, num_accepted: int, num_forced: int = 0) -> RoundOutcome:
    count = num_accepted + 1
    provenance = Provenance((), (1.0,) * count, (0.0,) * count, pool, ())
    answer = Verification(
        choice_token_ids=np.full(count, 7, np.uint32), choice_probabilities=np.ones(count), rows=(), logit_rows=(),
        kv_len=0, num_cached_tokens=0, forward_s=0.02, step_tokens=count,
    )  # fmt: skip
    drafted = np.full(num_draft_tokens, 7, np.uint32)
    return RoundOutcome(
        (7,) * count, provenance, drafted, num_draft_tokens, num_accepted, 0.0, 0.02, 0, 0, pool, "", (), answer,
        num_forced=num_forced,
    )  # fmt: skip


class Request:
    """One request for which pool a drafts, with four tokens per round."""

    def __init__(self, coordinator: Coordinator, prefill_s: float, records: PoolStatsTable) -> None:
        self.scores = ToldScores(coordinator.pools)
        self.scores.prefill_s = prefill_s
        self.routes = RoutingTable(coordinator.pools, records, self.scores, None, lambda _: "")
        setting = RoundSetting("s", 1, 0, PROMPT, SamplingFilters(), 1, Mode.REJECTION, None, VOCABULARY, None)
        self.tokens = SessionTokens([5] * PROMPT)
        self.route = RequestRouter(CLASS, self.routes, setting, self.tokens)
        assert self.route.begin() == "a"

    def run(self, num_rounds: int, num_accepted: int = 0, num_forced: int = 0) -> None:
        for _ in range(num_rounds):
            outcome = round_of("a", 4, num_accepted, num_forced)
            self.tokens.extend(outcome.token_ids)
            self.route.note(outcome, len(outcome.token_ids))

    def seconds_of(self, pool: str, tested: Sequence[float], accepted: Sequence[float]) -> float:
        """Return the seconds per token with a pool, from its part of the span."""
        own = Acceptance(1.0)
        own.add(tested, accepted, 1.0)
        rate = self.routes.rate(CLASS, pool, len(self.tokens), own)
        assert rate is not None
        return 1.0 / rate


def records() -> PoolStatsTable:
    known = PoolStatsTable()
    record(known.of("a"), 0.2)
    return known


async def break_even(coordinator: Coordinator) -> float:
    """Return the seconds of prefill per token at which a change to another pool just breaks even, after one span."""
    request = Request(coordinator, 1.0, records())
    request.run(SPAN + 1)
    scored = expected_rounds(rounds_of(Score((Q["b"],) * SPAN, forward_s=0.0), [1.0] * SPAN))
    here_s = request.seconds_of("a", [float(SPAN)], [0.0])
    there_s = request.seconds_of("b", scored.tested, scored.accepted)
    rest = len(request.tokens) - PROMPT
    assert there_s < 0.6 * here_s
    return rest * (WORTH_LEAVING * here_s - there_s) / len(request.tokens)


@pytest.mark.parametrize(("share", "pool"), [(0.1, "b"), (0.98, "b"), (1.02, "a"), (10.0, "a")])
async def test_a_pool_is_left_in_mid_stream_where_the_remaining_gain_exceeds_the_others_prefill(
    coordinator: Coordinator, share: float, pool: str
) -> None:
    """The remaining output is assumed to be as long as the present one, and the other pool must win by a margin."""
    request = Request(coordinator, share * await break_even(coordinator), records())
    request.run(SPAN)
    assert request.route.next_pool("a", MUCH) == "a", "nothing was scored yet"
    request.run(1)
    assert request.route.next_pool("a", MUCH) == pool
    assert request.route.next_pool("a", MUCH) == "a", "asked once after each span"


async def test_a_pool_is_not_left_for_few_remaining_tokens(coordinator: Coordinator) -> None:
    prefill_s = 0.5 * await break_even(coordinator)
    request = Request(coordinator, prefill_s, records())
    request.run(SPAN + 1)
    assert request.route.next_pool("a", SPAN // 4) == "a"
    request.run(SPAN)
    assert request.route.next_pool("a", MUCH) == "b"


async def test_a_pool_is_not_left_for_one_with_unknown_times(coordinator: Coordinator) -> None:
    request = Request(coordinator, 1e-9, PoolStatsTable())
    request.run(SPAN + 1)
    assert request.route.next_pool("a", MUCH) == "a"


async def test_a_pool_is_not_left_for_an_equal_one(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Q, "b", 0.0)
    request = Request(coordinator, 1e-9, records())
    for _ in range(6):
        request.run(SPAN + 1)
        assert request.route.next_pool("a", MUCH) == "a"


async def test_for_the_pool_that_drafts_the_tested_tokens_count(coordinator: Coordinator) -> None:
    request = Request(coordinator, 1e-9, records())
    request.run(SPAN, num_accepted=1)  # and one refused; two were never looked at
    (figures,) = request.routes.stats("a")
    assert figures.alpha == pytest.approx(0.5)


async def test_a_pool_that_drafts_behind_forced_tokens_looks_no_worse_than_one_that_is_scored_on_them(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft model is certain of a forced token, and only the drafting pool leaves these out."""
    monkeypatch.setitem(Q, "a", Q["b"])
    request = Request(coordinator, 1e-9, records())
    request.run(SPAN, num_accepted=2, num_forced=2)  # the first token of its own was refused each time
    drafting, scored = (request.routes.stats(pool)[0].alpha for pool in ("a", "b"))
    assert drafting == pytest.approx(scored)


async def test_the_oldest_spans_are_dropped_when_the_queue_is_full(coordinator: Coordinator) -> None:
    queue, ended = ScoreQueue(coordinator.pools), list[int]()
    request = ScoreRequest(make_round([5]), np.array([5], np.uint32))
    for index in range(MAX_WAITING + 8):
        queue.put(TokenSpan(request, (1.0,), (), lambda pool, score: None, partial(ended.append, index)))
    await queue.settle()
    assert queue.num_dropped == 8
    assert ended == list(range(8, MAX_WAITING + 8))
