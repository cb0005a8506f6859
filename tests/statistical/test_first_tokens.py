"""The joint distribution of the first three sampled tokens is the target's: one table of modes, drafts and backends.

Each row samples a running system and compares by chi-square (`first_tokens.py`). A row states its false-alarm rate:
1e-6, so the whole table raises a false alarm for one choice of seeds in 6,000. Seeds are fixed: a pass stays a pass.
Each row has negative controls: its samples follow neither the target's distribution at half the temperature nor, if
the draft has the target's tokens, the draft's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.round import answers
from draft_service.cross_vocabulary.translating_proposer import CrossVocabularyProposer
from draft_service.proposer import Proposer
from specdec.contract.types import Proposal, ProposeRequest, Support, Verification, VerifyRequest
from target_service.verifier import Verifier
from tests.engines.conftest import vllm
from tests.statistical.first_tokens import HEADS, HYBRID, JointDistribution, Row, build, p_value, sample, serve
from tests.support.redis_fixture import redis_server, redis_url

__all__ = ["redis_server", "redis_url", "vllm"]

MODES = ("rejection", "block", "coupled")
PLAIN = {"temperature": 1.0}
TOP_K_AND_TOP_P = {"temperature": 0.7, "top_k": 4, "top_p": 0.9}
PENALTIES_AND_BIAS = {
    "temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6,
    "logit_bias": {3: 0.8},
}  # fmt: skip
MIN_P = {"temperature": 0.7, "min_p": 0.1}
GREEDY = {"temperature": 0.0}
WIDER = {"temperature": 1.0, "top_k": 5, "top_p": 0.95}
REPEATING = {**TOP_K_AND_TOP_P, "repetition_penalty": 1.2}
TWO_TOKENS = {"temperature": 0.8, "top_k": 2}


def rows(
    drafts: Iterable[str],
    backends: Iterable[str],
    modes: Iterable[str],
    samplings: Iterable[dict[str, Any]],
    num_samples: int = 4000,
) -> list[Row]:
    """Return every combination. A distribution with a single outcome needs fewer samples."""
    return [
        Row(draft, backend, mode, sampling, num_samples if sampling["temperature"] else 64)
        for draft, backend, mode, sampling in itertools.product(drafts, backends, modes, samplings)
    ]


QUICK = (
    Row("model", "auto", "rejection", PLAIN, 1000),
    Row(HYBRID, "auto", "rejection", PLAIN, 300),
    Row("other tokenizer", "auto", "rejection", PLAIN, 300),
    Row("early exit", "native", "block", TOP_K_AND_TOP_P, 400),
    Row("model", "server", "block", TWO_TOKENS, 160),
)
FULL = (
    *rows(("model",), ("auto",), (*MODES, "off"), (PLAIN, TOP_K_AND_TOP_P, PENALTIES_AND_BIAS, MIN_P)),
    *rows((HYBRID,), ("auto",), (*MODES, "off"), (PLAIN, TOP_K_AND_TOP_P)),
    *rows(("model, ahead",), ("auto",), MODES, (PLAIN, TOP_K_AND_TOP_P, PENALTIES_AND_BIAS, MIN_P)),
    # Filters are computed by the same code in any arithmetic; without a draft, nothing is drafted ahead.
    *rows(("model, ahead",), ("eager", "int8", "bfloat16"), MODES, (PLAIN, TOP_K_AND_TOP_P)),
    *rows(("other tokenizer", "other tokenizer, as text"), ("auto",), MODES, (PLAIN, REPEATING)),
    *rows(("early exit",), ("native", "eager"), (*MODES, "off"), (GREEDY, TOP_K_AND_TOP_P, PLAIN, WIDER)),
    *rows(HEADS, ("auto",), MODES, (GREEDY, TOP_K_AND_TOP_P, PLAIN, WIDER)),
    # The text with vLLM is our own engine's, token for token, if the top tokens decide: test_backends.py.
    *rows(("model",), ("server", "vllm"), MODES[:2], (TWO_TOKENS,), 240),
    *rows(("model",), ("table over networks that cut",), MODES[:2], (PLAIN,), 1200),
)
ENGINES = rows(
    ("model",),
    ("real vllm", "real server", "real llama-cpp"),
    ("rejection",),
    ({"temperature": 0.8, "top_k": 20}, {"temperature": 1.0, "top_p": 0.9}),
    1000,
)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the checkpoints of a kind of draft."""

    @cache
    def folder_of(draft: str) -> Path:
        folder = tmp_path_factory.mktemp("few")
        build(draft, folder)
        return folder

    return folder_of


async def check(row: Row, request: pytest.FixtureRequest) -> None:
    async with serve(row, request.getfixturevalue) as system:
        counts = await sample(system, row)
        expected = JointDistribution(system.logits_after, system.prompt, row.sampling)
        value = p_value(counts, expected)
        print(f"p = {value:.3g}")
        assert value > row.false_alarm_rate
        if row.sampling["temperature"] == 0.0:  # any other outcome is excluded
            return
        cooler = row.sampling | {"temperature": row.sampling["temperature"] / 2}
        assert p_value(counts, JointDistribution(system.logits_after, system.prompt, cooler)) < row.false_alarm_rate
        if system.draft_logits_after is not None:
            drafted = JointDistribution(system.draft_logits_after, system.prompt, row.sampling)
            assert p_value(counts, drafted) < row.false_alarm_rate


@pytest.mark.parametrize("row", QUICK, ids=str)
async def test_three_tokens_follow_the_targets_joint_distribution(row: Row, request: pytest.FixtureRequest) -> None:
    await check(row, request)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "row",
    [
        *(pytest.param(row, marks=pytest.mark.full) for row in FULL),
        *(pytest.param(row, marks=pytest.mark.engines) for row in ENGINES),
    ],
    ids=str,
)
async def test_three_tokens_follow_the_targets_joint_distribution_in_every_row(
    row: Row, request: pytest.FixtureRequest
) -> None:
    await check(row, request)


# ---- negative controls: faults of one kind of draft ----------------------------------------------------------------


class MisdrawsHits(Proposer):
    """Answer branch hits with the least likely tokens, and a distribution under which they are always accepted."""

    async def propose(self, request: ProposeRequest) -> Proposal:
        proposal = await super().propose(request)
        if proposal.num_cached_tokens < request.position.committed_len:
            return proposal
        worst = [support.token_ids[support.weights.argmin()] for support in proposal.supports]
        stated = tuple(itertools.starmap(_stated_as_unlikely, zip(worst, proposal.supports, strict=True)))
        return replace(proposal, draft_token_ids=np.array(worst, dtype=np.uint32), supports=stated)


class RenormalisesAfterDrawing(CrossVocabularyProposer):
    """Draw from more tokens than both have: others become the top token, and q is stated as if they had not."""

    async def propose(self, request: ProposeRequest) -> Proposal:
        proposal = await super().propose(request)
        chance = np.random.default_rng([request.position.seed, request.position.round_id])
        if not proposal.supports or chance.random() > 0.7:
            return proposal
        top = [support.token_ids[support.weights.argmax()] for support in proposal.supports]
        return replace(proposal, draft_token_ids=np.array(top, dtype=np.uint32))


class MisstatesLocalDrafts(Verifier):
    """State that each token drafted by the target was most unlikely, so that it is always accepted."""

    async def verify(self, request: VerifyRequest, on_step: Any = None) -> Verification:
        verification = await super().verify(request, on_step)
        drafted = verification.drafted
        if drafted is None:
            return verification
        pairs = zip(drafted.draft_token_ids, drafted.supports, strict=True)
        stated = tuple(itertools.starmap(_stated_as_unlikely, pairs))
        return replace(verification, drafted=replace(drafted, supports=stated))


def _stated_as_unlikely(token_id: int, support: Support) -> Support:
    return Support(support.token_ids, np.where(support.token_ids == token_id, 1, 65_535).astype(np.uint16))


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        pytest.param(Row("model, ahead", "auto", "rejection", PLAIN, 1000), MisdrawsHits, marks=pytest.mark.full),
        (Row("other tokenizer", "auto", "rejection", PLAIN, 300), RenormalisesAfterDrawing),
        (Row("early exit", "native", "rejection", PLAIN, 400), MisstatesLocalDrafts),
    ],
    ids=["branch hits", "other tokenizer", "early exit"],
)
async def test_a_fault_of_one_kind_of_draft_is_detected(
    row: Row, fault: type, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator does not draw the tokens again here, as it would to find such a fault."""
    monkeypatch.setattr(answers, "check_drawn", lambda *_: None)
    async with serve(row, request.getfixturevalue, fault) as system:
        counts = await sample(system, row)
        expected = JointDistribution(system.logits_after, system.prompt, row.sampling)
        assert p_value(counts, expected) < row.false_alarm_rate
