"""The joint distribution of the first three tokens through the running services is the target's.

Target and draft have a vocabulary of few words, so that the joint distribution of three tokens can be enumerated with
the target's own logits (Hugging Face's, or the engine's alone if weights or arithmetic are rounded) and compared by
chi-square with what many sessions emit. False alarms: 1e-4 over all cases together (each case at 1e-4 / number of
cases); seeds are fixed, so a pass stays a pass.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draft_service.proposer import Proposer
from specdec.contract.types import Proposal, ProposeRequest, SamplingFilters, Support
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from tests.support.chi_square import chi_square_p_value
from tests.support.model_stack import ModelStack
from tests.support.redis_fixture import RedisServer
from tests.support.target_alone import TargetAlone
from tests.support.tiny_models import build_tiny_pair

VOCABULARY = 6
PROMPT = (2, 3, 4, 5)
NUM_TOKENS = 3
GAMMA = 2
NUM_AT_ONCE = 64
NUM_SAMPLES = 1000
NUM_LONG_SAMPLES = 4000
#: Few enough that the draft service drafts ahead for all of them.
NUM_AT_ONCE_PREDRAFTED = 8
FALSE_ALARM = 1e-4

MODES = ("rejection", "block", "coupled", "off")
FILTERS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "top_k_and_top_p": {"temperature": 0.7, "top_k": 4, "top_p": 0.9},
    "penalties_and_bias": {
        "temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6,
        "logit_bias": {3: 0.8},
    },
    "min_p": {"temperature": 0.7, "min_p": 0.1},
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """Configuration of the services."""

    predrafts: bool = False
    dtype: str = "float32"
    backend: str = "auto"


SETUPS = {
    "as usual": Setup(),
    "pre-drafted": Setup(predrafts=True),
    "eager, pre-drafted": Setup(predrafts=True, backend="eager"),
    "int8, pre-drafted": Setup(predrafts=True, dtype="int8"),
    "bfloat16, pre-drafted": Setup(predrafts=True, dtype="bfloat16"),
}
CASES = tuple(itertools.product(MODES, FILTERS, SETUPS))
#: Laws with filters are cut by the same code in any setup; without a draft there is nothing to draft ahead.
LONG_CASES = tuple(
    (mode, name, setup)
    for mode, name, setup in CASES
    if setup == "as usual" or (mode != "off" and (setup == "pre-drafted" or name in ("plain", "top_k_and_top_p")))
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_tiny_pair(
        "llama", tmp_path_factory.mktemp("few"), vocabulary_size=VOCABULARY, logit_spread=1.5, perturb=0.15
    )


def joint_law(checkpoint: Path, law: SamplingFilters, dtype: str = "float32") -> dict[tuple[int, ...], float]:
    """Probability of every continuation of three tokens, from the target's logits and the reference filters."""
    alone = TargetAlone(checkpoint, dtype)
    prefixes = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, mass in prefixes.items():
            for token_id, share in enumerate(alone.law([*PROMPT, *prefix], law, len(PROMPT))):
                if share > 0:
                    longer[(*prefix, token_id)] = mass * float(share)
        prefixes = longer
    return prefixes


async def sample(
    pair: tuple[Path, Path],
    redis_url: str,
    num_samples: int,
    options: dict[str, Any],
    setup: Setup = SETUPS["as usual"],
    proposer_type: type[Proposer] = Proposer,
) -> Counter[tuple[int, ...]]:
    workers = [
        load_worker(
            LoadRequest(
                str(path), device="cpu", dtype=setup.dtype, num_kv_blocks=256, compiling=CompileOptions(setup.backend)
            )
        )
        for path in pair
    ]
    async with ModelStack(
        pair[0], workers[0], {"default": workers[1]}, redis_url=redis_url, proposer_type=proposer_type,
        predrafting=("default",) if setup.predrafts else (), patience=GAMMA + 1,
    ) as stack:  # fmt: skip
        gate = asyncio.Semaphore(NUM_AT_ONCE_PREDRAFTED if setup.predrafts else NUM_AT_ONCE)

        async def draw(seed: int) -> tuple[int, ...]:
            async with gate:
                completion = await stack.generate(
                    PROMPT, max_new_tokens=NUM_TOKENS, seed=seed, ignore_eos=True, gamma=GAMMA, **options
                )
                return completion.token_ids

        counts = Counter(await asyncio.gather(*(draw(seed) for seed in range(num_samples))))
        if setup.predrafts:
            num_hits = stack.num_predrafted("default", "hit", "extended")
            print(f"{num_hits:.0f} branch hits, {stack.num_predrafted('default', 'miss'):.0f} misses")
            assert num_hits > num_samples / 20, "a law that branches have no part in would prove nothing of them"
        return counts


def p_value(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square of the counts against the law; outcomes expected fewer than 5 times are pooled."""
    if set(counts) - set(law):
        return 0.0
    if len(law) == 1:
        return 1.0
    num_samples = counts.total()
    common = [outcome for outcome, mass in law.items() if mass * num_samples >= 5]
    observed = [counts[outcome] for outcome in common]
    expected = [law[outcome] * num_samples for outcome in common]
    observed.append(num_samples - sum(observed))
    expected.append(num_samples - sum(expected))
    if expected[-1] < 5:
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    return chi_square_p_value(observed, np.array(expected) * (sum(observed) / sum(expected)))


async def check_filters(
    pair: tuple[Path, Path], redis_url: str, mode: str, name: str, setup: str, num_samples: int
) -> None:
    counts = await sample(pair, redis_url, num_samples, {**FILTERS[name], "mode": mode}, SETUPS[setup])
    check_law(counts, pair, mode, name, setup)


def check_law(counts: Counter[tuple[int, ...]], pair: tuple[Path, Path], mode: str, name: str, setup: str) -> None:
    law = joint_law(pair[0], SamplingFilters(**FILTERS[name]), SETUPS[setup].dtype)
    value = p_value(counts, law)
    print(f"{mode} {name}, {setup}: p = {value:.3g} over {counts.total()} samples, {len(law)} outcomes")
    assert value > FALSE_ALARM / len(CASES)


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path], redis_server: RedisServer) -> Counter[tuple[int, ...]]:
    """Samples of rejection at temperature 1, which its test and the negative control judge."""
    options = {**FILTERS["plain"], "mode": "rejection"}
    return asyncio.run(sample(pair, redis_server.url, NUM_SAMPLES, options))


def test_three_tokens_follow_the_targets_joint_law(pair: tuple[Path, Path], plain: Counter[tuple[int, ...]]) -> None:
    check_law(plain, pair, "rejection", "plain", "as usual")


@pytest.mark.full
async def test_three_tokens_that_were_drafted_ahead_follow_the_targets_joint_law(
    pair: tuple[Path, Path], redis_url: str
) -> None:
    await check_filters(pair, redis_url, "coupled", "min_p", "pre-drafted", NUM_SAMPLES)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("mode", "name", "setup"), LONG_CASES)
async def test_three_tokens_follow_the_targets_joint_law_for_every_mode_filter_and_setup(
    pair: tuple[Path, Path], redis_url: str, mode: str, name: str, setup: str
) -> None:
    await check_filters(pair, redis_url, mode, name, setup, NUM_LONG_SAMPLES)


def test_the_drafts_own_law_would_be_noticed(pair: tuple[Path, Path], plain: Counter[tuple[int, ...]]) -> None:
    """Negative control: the samples follow neither the draft's law nor the target's at another temperature."""
    assert p_value(plain, joint_law(pair[1], SamplingFilters())) < FALSE_ALARM / len(CASES)
    assert p_value(plain, joint_law(pair[0], SamplingFilters(temperature=0.8))) < FALSE_ALARM / len(CASES)


class MisdrawsHits(Proposer):
    """Answers branch hits with the least likely tokens, and a law under which they are always accepted."""

    async def propose(self, request: ProposeRequest) -> Proposal:
        proposal = await super().propose(request)
        if proposal.num_cached_tokens < request.position.committed_len:
            return proposal
        worst = [int(support.weights.argmin()) for support in proposal.supports]
        stated = []
        for support, entry in zip(proposal.supports, worst, strict=True):
            weights = np.full_like(support.weights, 65_535)
            weights[entry] = 1
            stated.append(Support(support.token_ids, weights))
        token_ids = [support.token_ids[entry] for support, entry in zip(proposal.supports, worst, strict=True)]
        return replace(proposal, draft_token_ids=np.array(token_ids, dtype=np.uint32), supports=tuple(stated))


@pytest.mark.full
async def test_a_fault_in_branch_hits_alone_would_be_noticed(pair: tuple[Path, Path], redis_url: str) -> None:
    """Negative control of pre-drafting: hits are part enough of the samples."""
    options = {"temperature": 1.0, "mode": "rejection"}
    counts = await sample(pair, redis_url, NUM_SAMPLES, options, SETUPS["pre-drafted"], MisdrawsHits)
    assert p_value(counts, joint_law(pair[0], SamplingFilters())) < FALSE_ALARM / len(CASES)
