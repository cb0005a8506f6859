"""Scores of local drafts: what each would have drafted in the round that begins at each committed token, at nobody's
cost. Compared with what the same verifier really drafts there, for early exits and heads alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.replicas.replica import TARGET
from specdec.contract.constraint import Constraint
from specdec.contract.errors import InvalidRequest, ResourceExhausted
from specdec.contract.types import (
    SCORED_GAMMA,
    DrawRule,
    LocalDraft,
    Proposal,
    SamplingFilters,
    Score,
    ScoreRequest,
    VerifyRequest,
)
from specdec.core.sparse import probability
from specdec.engine.base import Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.settings.draft_specs import LocalDraftSpec
from specdec.structured.known_constraints import KnownConstraints
from target_service.verifier import Verifier
from tests.support.byte_tokenizer import EOS, byte_table, ids_of, write_byte_tokenizer
from tests.support.clock import Clock
from tests.support.head_checkpoints import (
    as_speculators,
    eagle3_config,
    eagle3_tensors,
    medusa_tensors,
    write_eagle3,
    write_medusa,
)
from tests.support.mtp_checkpoints import build_mtp_checkpoint
from tests.support.round_driver import make_round
from tests.support.table_services import linked
from tests.support.table_worker import TableWorker
from tests.support.tiny_models import build_tiny_model

VOCABULARY, WIDTH = 24, 64
NUM_MEDUSA = 3
POOLS = ("early-exit", "eagle3", "medusa")
NO_TOKENS = np.empty(0, dtype=np.uint32)

GREEDY = SamplingFilters(temperature=0.0)
SAMPLED = SamplingFilters(temperature=0.8, top_k=9, top_p=0.95, repetition_penalty=1.1)
LAWS = [
    (GREEDY, DrawRule.DISTRIBUTION),
    (SAMPLED, DrawRule.DISTRIBUTION),
    (SAMPLED, DrawRule.COUPLED),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of few tokens, and heads of random weights: they are right now and then."""
    folder = tmp_path_factory.mktemp("heads")
    build_tiny_model("llama", folder / "target", vocabulary_size=VOCABULARY, num_layers=4)
    config = eagle3_config(WIDTH, VOCABULARY, VOCABULARY - 4)
    write_eagle3(folder / "eagle3", as_speculators(config, [1, 3, 4]), eagle3_tensors(config))
    write_medusa(folder / "medusa", medusa_tensors(WIDTH, VOCABULARY, num_heads=NUM_MEDUSA))
    return folder


def load(folder: Path, backend: str) -> Worker:
    heads = [LocalDraftSpec(kind, kind, path=str(folder / kind)) for kind in ("eagle3", "medusa")]
    return load_worker(
        LoadRequest(
            str(folder / "target"),
            device="cpu",
            dtype="float32",
            num_kv_blocks=64,
            num_threads=1,
            compiling=CompileOptions(backend),
            local_drafts=(LocalDraftSpec("early-exit", "early-exit", 3), *heads),
        )
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["native", pytest.param("eager", marks=pytest.mark.full)])
async def verifier(request: pytest.FixtureRequest, folder: Path, clock: Clock) -> AsyncIterator[Verifier]:
    verifier = Verifier(load(folder, request.param), clock=clock)
    yield verifier
    verifier.check_integrity()
    await verifier.close()


def asked_to_score(tokens: Sequence[int], num_scored: int, pool: str, **position: object) -> ScoreRequest:
    asked = make_round(tokens[:-num_scored], **position)  # type: ignore[arg-type]
    return ScoreRequest(asked, np.array(tokens[-num_scored:], dtype=np.uint32), pool)


async def drafted(verifier: Verifier, tokens: Sequence[int], pool: str, **position: object) -> Proposal:
    """What a round after these tokens really drafts."""
    round_id = len(tokens)
    begun = make_round(tokens[:-1], round_id=2 * round_id, **position)  # type: ignore[arg-type]
    await verifier.verify(VerifyRequest(begun, NO_TOKENS, ()))
    asked = make_round(tokens, round_id=2 * round_id + 1, **position)  # type: ignore[arg-type]
    answer = await verifier.verify(VerifyRequest(asked, NO_TOKENS, (), local_draft=LocalDraft(pool, SCORED_GAMMA)))
    assert answer.drafted is not None
    return answer.drafted


def rounds_in(score: Score) -> list[tuple[float, ...]]:
    ends = np.cumsum(score.round_lengths)
    return [score.q[end - length : end] for end, length in zip(ends, score.round_lengths, strict=True)]


async def committed(
    verifier: Verifier, pool: str, num_tokens: int, others: Sequence[int], **position: object
) -> list[int]:
    """A session that says what the pool drafts for up to three tokens, and then one of the others. There are several
    boundaries of blocks in it, the first where its output begins."""
    tokens = [2 + index * 7 % 20 for index in range(16)]
    while len(tokens) < 16 + num_tokens:
        real = (await drafted(verifier, tokens, pool, **position)).draft_token_ids.tolist()
        right = real[: len(tokens) % 4]
        tokens += [*right, others[(real[len(right)] if len(right) < len(real) else 0) // 2 % len(others)]]
    await verifier.release(["s"])
    return tokens[: 16 + num_tokens]


@pytest.mark.parametrize(("filters", "draw_rule"), LAWS, ids=["greedy", "rejection", "coupled"])
@pytest.mark.parametrize("pool", POOLS)
async def test_a_score_tells_each_rounds_draft_as_it_would_have_been(
    verifier: Verifier, clock: Clock, pool: str, filters: SamplingFilters, draw_rule: DrawRule
) -> None:
    score = await require_true_scores(verifier, clock, pool, filters=filters, draw_rule=draw_rule)
    if pool == "medusa":
        assert max(score.round_lengths) <= NUM_MEDUSA


async def test_a_layer_that_the_checkpoint_brings_is_scored_as_heads_are(clock: Clock, tmp_path: Path) -> None:
    directory = build_mtp_checkpoint("mellum", tmp_path / "target")
    worker = load_worker(
        LoadRequest(
            str(directory),
            device="cpu",
            dtype="float32",
            num_kv_blocks=64,
            num_threads=1,
            local_drafts=(LocalDraftSpec("mtp", "mtp"),),
        )
    )
    verifier = Verifier(worker, clock=clock)
    await require_true_scores(verifier, clock, "mtp", filters=SAMPLED, draw_rule=DrawRule.DISTRIBUTION)
    verifier.check_integrity()
    await verifier.close()


@pytest.mark.parametrize(("filters", "draw_rule"), LAWS, ids=["greedy", "rejection", "coupled"])
async def test_a_score_is_masked_as_the_round_would_have_been(
    folder: Path, clock: Clock, tmp_path: Path, filters: SamplingFilters, draw_rule: DrawRule
) -> None:
    write_byte_tokenizer(tmp_path)
    constraint = Constraint.regex("[abc12]*")
    identity = byte_table(tmp_path).identity_of(constraint)
    filters = replace(filters, constraint_id=identity, end_token_ids=(EOS,))
    known = KnownConstraints(str(tmp_path), (EOS,), VOCABULARY)
    verifier = Verifier(load(folder, "native"), clock=clock, constraints=known)
    told = replace(make_round(TOKENS[:16], filters=filters, output_start=16), constraint=constraint)
    await verifier.verify(VerifyRequest(told, NO_TOKENS, ()))
    law = {"filters": filters, "draw_rule": draw_rule}
    await require_true_scores(verifier, clock, "early-exit", others=ids_of("ab1c2ab12b"), **law)
    verifier.check_integrity()
    await verifier.close()


async def require_true_scores(
    verifier: Verifier,
    clock: Clock,
    pool: str,
    *,
    others: Sequence[int] = range(2, 2 + VOCABULARY // 2),
    **law: object,
) -> Score:
    """Scores a span, and compares each of its rounds with what is really drafted there."""
    position = {"seed": 5, "output_start": 16} | law
    num_scored = 36
    tokens = await committed(verifier, pool, num_scored, others, **position)
    clock.now_s += 10.0
    score = await verifier.score(asked_to_score(tokens, num_scored, pool, **position))
    rounds = rounds_in(score)
    assert len(rounds) == num_scored
    num_right = 0
    for first, scored in enumerate(rounds):
        start = len(tokens) - num_scored + first
        real, following = await drafted(verifier, tokens[:start], pool, **position), tokens[start:]
        drawn = real.draft_token_ids.tolist()
        if real.supports:
            assert scored[0] == pytest.approx(probability(following[0], real.supports[0]), abs=0.002)
            # Beyond its first token it is the same round as long as it drew what was committed.
            same = [*map(int.__eq__, drawn, following), False].index(False)
            for index in range(min(same + 1, len(scored), len(real.supports))):
                expected = probability(following[index], real.supports[index])
                assert scored[index] == pytest.approx(expected, abs=0.002), (first, index)
            num_right += same
        else:
            right = [float(ours == theirs) for ours, theirs in zip(drawn, following, strict=False)]
            expected = right[: right.index(0.0) + 1] if 0.0 in right else right
            assert list(scored) == expected, first
            num_right += expected.count(1.0)
    assert num_right > 10, "some rounds go beyond their first token"
    return score


@pytest.fixture
async def table(clock: Clock) -> AsyncIterator[Verifier]:
    verifier = Verifier(TableWorker(local_drafts={"early-exit": 1}), clock=clock)
    yield verifier
    verifier.check_integrity()
    await verifier.close()


TOKENS = [3 + index * 7 % 20 for index in range(60)]


async def test_a_score_leaves_nothing_behind_and_no_session_changes(table: Verifier, clock: Clock) -> None:
    asked = VerifyRequest(make_round(TOKENS[:40]), NO_TOKENS, ())
    before = await table.verify(asked)
    clock.now_s += 10.0
    sessions = table.info().num_sessions
    await table.score(asked_to_score(TOKENS, 20, "early-exit", session_id="s"))
    assert table.info().num_sessions == sessions
    again = await table.verify(VerifyRequest(make_round(TOKENS[:41], round_id=1), NO_TOKENS, ()))
    assert again.num_cached_tokens == 40
    assert before.kv_len == 40


async def test_whoever_is_waited_for_comes_first(clock: Clock) -> None:
    worker = TableWorker(local_drafts={"early-exit": 1})
    verifier = Verifier(worker, clock=clock)
    try:
        await verifier.verify(VerifyRequest(make_round(TOKENS[:30]), NO_TOKENS, ()))
        with pytest.raises(ResourceExhausted) as caught:  # its session may call at any moment
            await verifier.score(asked_to_score(TOKENS, 20, "early-exit"))
        assert caught.value.reason == "REPLICA_BUSY"
        clock.now_s += 10.0
        worker.gate.clear()
        scoring = asyncio.create_task(verifier.score(asked_to_score(TOKENS, 20, "early-exit")))
        await asyncio.to_thread(worker.entered.acquire)
        verifying = asyncio.create_task(
            verifier.verify(VerifyRequest(make_round(TOKENS[:31], round_id=1), NO_TOKENS, ()))
        )
        await asyncio.sleep(0)
        worker.gate.set()
        assert len((await verifying).choice_token_ids) == 1
        with pytest.raises(ResourceExhausted):
            await scoring
        verifier.check_integrity()
    finally:
        worker.gate.set()
        await verifier.close()


async def test_a_score_that_nobody_waits_for_any_more_leaves_nothing_behind(clock: Clock) -> None:
    worker = TableWorker(local_drafts={"early-exit": 1})
    verifier = Verifier(worker, clock=clock)
    try:
        worker.gate.clear()
        scoring = asyncio.create_task(verifier.score(asked_to_score(TOKENS, 20, "early-exit")))
        await asyncio.to_thread(worker.entered.acquire)
        scoring.cancel()
        await asyncio.sleep(0)
        worker.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        assert verifier.info().num_sessions == 0
        verifier.check_integrity()
    finally:
        worker.gate.set()
        await verifier.close()


@pytest.mark.parametrize(
    ("pool", "tokens", "num_scored", "field"),
    [
        ("eagle3", TOKENS, 20, "local_pool"),
        ("", TOKENS, 20, "local_pool"),
        ("early-exit", TOKENS * 20, 20, "round.token_ids"),
    ],
)
async def test_what_cannot_be_scored_is_refused_by_name(
    table: Verifier, pool: str, tokens: list[int], num_scored: int, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await table.score(asked_to_score(tokens, num_scored, pool))
    assert caught.value.field == field
    assert table.info().num_sessions == 0


async def test_scores_travel_as_rounds(table: Verifier, clock: Clock) -> None:
    request = asked_to_score(TOKENS, 20, "early-exit", filters=SAMPLED)
    expected = await table.score(request)
    async with linked(TARGET, table) as link:
        score = await link.score(request)
        assert score.round_lengths == expected.round_lengths
        assert score.q == pytest.approx(expected.q, rel=1e-6)
        with pytest.raises(InvalidRequest):
            await link.score(asked_to_score(TOKENS, 20, "none"))
