"""The joint law of the first three tokens is the target's, drafted by a model with a tokenizer of its own.

As `test_sampled_law`, by chi-square against the enumerated law. One draft has every token in common with the target,
the other one some that are not, so that much of what it drafts is text. False alarms: 1e-4 over all cases together.
Temperature 0 is `tests/integration/test_translated_drafts.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.round import answers
from draft_service.cross_vocabulary.proposer import CrossVocabularyProposer
from specdec.contract.types import Proposal, ProposeRequest, SamplingFilters
from tests.e2e.test_sampled_law import FALSE_ALARM, GAMMA, NUM_AT_ONCE, NUM_TOKENS, PROMPT, joint_law, p_value
from tests.support.cross_vocabulary_rig import CrossVocabulary, cross_vocabulary_stack
from tests.support.other_tokenizers import build_model, save_byte_level_vocabulary, save_piece_vocabulary

NUM_SAMPLES = 300
NUM_LONG_SAMPLES = 4000
MODES = ("rejection", "block", "coupled")
FILTERS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "top_k_and_top_p": {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.2},
}
DRAFTS = {
    "in common": ["<|end|>", "Ġ", "a", "Ã©", "Ġa", "aÃ©"],
    "as text": ["<|end|>", "Ġ", "a", "Ã", "©", "Ã©", "Ġa", "aa"],
}
CASES = tuple(itertools.product(MODES, FILTERS, DRAFTS))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("few")
    pieces = ["<unk>", "</s>", "▁", "a", "é", "▁a", "aé"]
    save_piece_vocabulary(folder / "t", pieces, [("▁", "a"), ("a", "é")])
    built = {"target": build_model(folder / "t", folder / "target", logit_spread=1.0)}
    for name, tokens in DRAFTS.items():
        merges = [("Ġ", "a"), *((("Ã", "©"), ("a", "a")) if "aa" in tokens else ())]
        save_byte_level_vocabulary(folder / f"t-{name}", tokens, merges)
        built[name] = build_model(folder / f"t-{name}", folder / name, logit_spread=1.0, seed=5)
    return built


async def sample(
    models: dict[str, Path],
    draft: str,
    num_samples: int,
    options: dict[str, Any],
    proposer_type: type[CrossVocabularyProposer] = CrossVocabularyProposer,
) -> tuple[Counter[tuple[int, ...]], CrossVocabulary]:
    async with cross_vocabulary_stack(models["target"], models[draft], proposer_type=proposer_type) as run:
        gate = asyncio.Semaphore(NUM_AT_ONCE)

        async def draw(seed: int) -> tuple[int, ...]:
            async with gate:
                completion = await run.stack.generate(
                    PROMPT, max_new_tokens=NUM_TOKENS, seed=seed, ignore_eos=True, gamma=GAMMA, **options
                )
                return completion.token_ids

        return Counter(await asyncio.gather(*(draw(seed) for seed in range(num_samples)))), run


async def check(models: dict[str, Path], mode: str, name: str, draft: str, num_samples: int) -> None:
    options = FILTERS[name]
    counts, run = await sample(models, draft, num_samples, {**options, "mode": mode})
    value = p_value(counts, joint_law(models["target"], SamplingFilters(**options)))
    print(f"{mode} {name}, {draft}: p = {value:.3g}, {run.num_drawn} drawn, {run.num_point_masses} point masses")
    if mode != "coupled":
        assert (run.num_drawn if draft == "in common" else run.num_point_masses) > num_samples / 4
    assert value > FALSE_ALARM / len(CASES)


@pytest.mark.parametrize(
    ("mode", "name", "draft"),
    [
        ("rejection", "plain", "in common"),
        ("rejection", "top_k_and_top_p", "as text"),
    ],
)
async def test_three_tokens_follow_the_targets_joint_law(
    models: dict[str, Path], mode: str, name: str, draft: str
) -> None:
    await check(models, mode, name, draft, NUM_SAMPLES)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("mode", "name", "draft"), CASES)
async def test_three_tokens_follow_the_targets_joint_law_in_every_mode_and_with_every_draft(
    models: dict[str, Path], mode: str, name: str, draft: str
) -> None:
    await check(models, mode, name, draft, NUM_LONG_SAMPLES)


class RenormalisesAfterDrawing(CrossVocabularyProposer):
    """Draws from more than is in common: what falls outside becomes the likeliest token, and q is stated as if not."""

    async def propose(self, request: ProposeRequest) -> Proposal:
        proposal = await super().propose(request)
        chance = np.random.default_rng([request.position.seed, request.position.round_id])
        if not proposal.supports or chance.random() > 0.7:
            return proposal
        likeliest = [support.token_ids[support.weights.argmax()] for support in proposal.supports]
        return replace(proposal, draft_token_ids=np.array(likeliest, dtype=np.uint32))


async def test_renormalising_after_drawing_would_be_noticed(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control, with a coordinator that does not draw the tokens again."""
    monkeypatch.setattr(answers, "check_drawn", lambda *_: None)
    options = {"temperature": 1.0, "mode": "rejection"}
    counts, _ = await sample(models, "in common", NUM_SAMPLES, options, RenormalisesAfterDrawing)
    assert p_value(counts, joint_law(models["target"], SamplingFilters())) < FALSE_ALARM / len(CASES)
