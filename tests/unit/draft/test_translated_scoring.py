"""Scores and times of a draft with another tokenizer, compared with the rounds that it really drafts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draft_service.cross_vocabulary.translating_proposer import CrossVocabularyProposer
from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.contract.constraint import Constraint
from specdec.contract.errors import InvalidRequest, ResourceExhausted
from specdec.contract.types import SCORED_GAMMA, DrawRule, ProposeRequest, SamplingFilters, ScoreRequest
from specdec.core.sparse import probability
from specdec.engine.loader import load_worker
from specdec.engine.options import LoadRequest
from specdec.structured.known_constraints import KnownConstraints
from tests.support.other_tokenizers import (
    CORPUS,
    TEXTS,
    build_cross_vocabulary_copy,
    build_model,
    load_pair,
    save_byte_level,
    save_characters,
    save_pieces,
)
from tests.support.round_driver import make_round

NUM_SCORED = 40
GREEDY = SamplingFilters(temperature=0.0)
SAMPLED = SamplingFilters(temperature=0.9, top_k=20)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("translated")
    target = build_model(save_pieces(folder / "pieces"), folder / "target", logit_spread=0.6)
    build_cross_vocabulary_copy(target, save_byte_level(folder / "bytes"), folder / "draft")
    return target


@pytest.fixture
async def proposer(target: Path) -> AsyncIterator[CrossVocabularyProposer]:
    draft = target.parent / "draft"
    worker = load_worker(LoadRequest(str(draft), device="cpu", dtype="float32", num_kv_blocks=128, num_threads=1))
    proposer = CrossVocabularyProposer(worker, load_pair(draft, target))
    yield proposer
    proposer.check_integrity()
    await proposer.close()


@pytest.fixture
async def texts(proposer: CrossVocabularyProposer, target: Path) -> list[list[int]]:
    """Prompts with what follows: some tokens of the draft's and then another one, and text with tokens that the draft
    does not know."""
    tokenizer = load_tokenizer(target)
    said = []
    for text in (TEXTS[0], TEXTS[2], CORPUS[3]):
        tokens = tokenizer.encode(text)
        end = len(tokens) + NUM_SCORED
        while len(tokens) < end:
            asked = make_round(tokens, session_id="said", round_id=len(tokens))
            real = (await proposer.propose(ProposeRequest(asked, SCORED_GAMMA))).draft_token_ids.tolist()
            tokens += [*real[: 1 + len(tokens) % 4], 300]
        said.append(tokens[:end])
        await proposer.release(["said"])
    return [*said, tokenizer.encode(TEXTS[1] + CORPUS[1] + CORPUS[0])]


@pytest.mark.parametrize(
    ("filters", "draw_rule"),
    [(GREEDY, DrawRule.DISTRIBUTION), (SAMPLED, DrawRule.COUPLED)],
    ids=["greedy", "coupled"],
)
async def test_a_score_is_of_the_very_rounds_that_it_would_have_drafted(
    proposer: CrossVocabularyProposer, texts: list[list[int]], filters: SamplingFilters, draw_rule: DrawRule
) -> None:
    num_right = 0
    for number, tokens in enumerate(texts):
        scored, start = tokens[-NUM_SCORED:], len(tokens) - NUM_SCORED
        position = {"filters": filters, "draw_rule": draw_rule, "output_start": start, "seed": 3}
        asked = ScoreRequest(make_round(tokens[:start], **position), np.array(scored, dtype=np.uint32))  # type: ignore[arg-type]
        score = await proposer.score(asked)
        assert (len(score.q), score.round_lengths) == (NUM_SCORED, ())
        expected: list[float] = []
        while len(expected) < NUM_SCORED:
            first = len(expected)
            committed = make_round(
                tokens[: start + first],
                session_id=f"real-{number}-{first}",
                **position,  # type: ignore[arg-type]
            )
            gamma = min(SCORED_GAMMA, NUM_SCORED - first)
            real = (await proposer.propose(ProposeRequest(committed, gamma))).draft_token_ids.tolist()
            await proposer.release([committed.session_id])
            right = [float(ours == theirs) for ours, theirs in zip(real or [-1], scored[first:], strict=False)]
            expected += right[: right.index(0.0) + 1] if 0.0 in right else right
        assert list(score.q) == expected
        num_right += expected.count(1.0)
    assert 0.1 < num_right / (len(texts) * NUM_SCORED) < 0.99


@pytest.mark.parametrize("pattern", ["", "[ a-héß今天🌲]*"], ids=["any text", "constrained"])
async def test_at_a_temperature_q_is_what_each_token_would_have_been_drawn_with(tmp_path: Path, pattern: str) -> None:
    """Of tokenizers that have a token a character in common: none of it goes on as text."""
    models = []
    for in_bytes in (True, False):
        tokenizer = save_characters(tmp_path / f"tokenizer {in_bytes}", in_bytes=in_bytes)
        models.append(build_model(tokenizer, tmp_path / f"model {in_bytes}", logit_spread=0.6))
    target, draft = models
    worker = load_worker(LoadRequest(str(draft), device="cpu", dtype="float32", num_kv_blocks=128, num_threads=1))
    pair, tokenizer = load_pair(draft, target), load_tokenizer(target)
    ends = (int(tokenizer.eos_token_id),)  # type: ignore[arg-type]
    known = KnownConstraints(str(target), ends, pair.target_size, is_authority=False)
    proposer = CrossVocabularyProposer(worker, pair, constraints=known)
    tokens = tokenizer.encode("a cab éß 今天 bed 🌲 face a deaf hed")
    constraint = Constraint.regex(pattern) if pattern else None
    identity = known.table.identity_of(constraint) if constraint else b""
    filters = replace(SAMPLED, constraint_id=identity, end_token_ids=ends)
    position = {"filters": filters, "output_start": 5, "seed": 3}
    before = replace(make_round(tokens[:5], **position), constraint=constraint)  # type: ignore[arg-type]
    asked = ScoreRequest(before, np.array(tokens[5:], dtype=np.uint32))
    num_drawn = 0
    try:
        score = await proposer.score(asked)
        for index, token_id in enumerate(tokens[5:]):
            committed = make_round(tokens[: 5 + index], round_id=index, **position)  # type: ignore[arg-type]
            (support,) = (await proposer.propose(ProposeRequest(committed, 1))).supports
            num_drawn += len(support.token_ids) > 1
            assert score.q[index] == pytest.approx(probability(token_id, support), abs=0.002)
        assert num_drawn > len(score.q) / 2
        assert 0.0 < max(score.q) < 1.0
    finally:
        await proposer.close()


async def test_a_score_leaves_nothing_behind_and_yields_to_whoever_is_drafted_for(
    proposer: CrossVocabularyProposer, texts: list[list[int]]
) -> None:
    tokens = texts[0]
    asked = ScoreRequest(make_round(tokens[:-8]), np.array(tokens[-8:], dtype=np.uint32))
    await proposer.score(asked)
    proposer.check_integrity()  # after all that was posted before
    assert proposer.info().num_sessions == 0
    await proposer.propose(ProposeRequest(make_round(tokens, session_id="p"), 2))
    with pytest.raises(ResourceExhausted) as caught:
        await proposer.score(asked)
    assert caught.value.reason == "REPLICA_BUSY"
    long = make_round([5] * 600)
    with pytest.raises(InvalidRequest):
        await proposer.score(ScoreRequest(long, np.array([5], dtype=np.uint32)))


async def test_a_timed_round_is_told_when_its_own_steps_ran(proposer: CrossVocabularyProposer, target: Path) -> None:
    asked = make_round(load_tokenizer(target).encode(TEXTS[0]), session_id="timed", round_id=1)
    asked.is_timed = True
    began_s = time.monotonic()
    stages = (await proposer.propose(ProposeRequest(asked, SCORED_GAMMA))).stages
    assert stages is not None
    assert began_s <= stages.admitted_s <= stages.step_began_s < stages.step_ended_s <= time.monotonic()
