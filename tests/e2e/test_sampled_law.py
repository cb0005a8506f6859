"""The joint law of the first three tokens through the running services is the target's.

A target and a draft over a vocabulary of few words, so that the joint law of three tokens can be enumerated with
Hugging Face's own logits and compared by chi-square with what many sessions emit. False alarms: 1e-4 over all cases
together (each case at 1e-4 / number of cases); seeds are fixed, so a pass stays a pass.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from specdec.core.filters import filtered_law
from specdec.engine.hf_adapter import load_worker
from specdec.types import LawParams
from tests.model_stack import ModelStack
from tests.tiny_models import build_tiny_pair

VOCABULARY = 6
PROMPT = (2, 3, 4, 5)
NUM_TOKENS = 3
NUM_AT_ONCE = 64
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
CASES = tuple(itertools.product(MODES, FILTERS))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_tiny_pair(
        "llama", tmp_path_factory.mktemp("few"), vocabulary_size=VOCABULARY, logit_spread=1.5, perturb=0.15
    )


def joint_law(checkpoint: Path, law: LawParams) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of three tokens, from Hugging Face's logits and the reference filters."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    prefixes = {(): 1.0}
    for _ in range(NUM_TOKENS):
        ids = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
        with torch.inference_mode():
            rows = model(ids).logits[:, -1].numpy()
        longer: dict[tuple[int, ...], float] = {}
        for (prefix, mass), row in zip(prefixes.items(), rows, strict=True):
            history = np.array([*PROMPT, *prefix], np.uint32)
            for token_id, share in enumerate(filtered_law(row, law, history, len(PROMPT))):
                if share > 0:
                    longer[(*prefix, token_id)] = mass * float(share)
        prefixes = longer
    return prefixes


async def sample(
    pair: tuple[Path, Path], redis_url: str, num_samples: int, options: dict[str, Any]
) -> Counter[tuple[int, ...]]:
    workers = [load_worker(str(path), device="cpu", dtype="float32", num_kv_blocks=2048) for path in pair]
    async with ModelStack(pair[0], workers[0], {"default": workers[1]}, redis_url=redis_url) as stack:
        gate = asyncio.Semaphore(NUM_AT_ONCE)

        async def draw(seed: int) -> tuple[int, ...]:
            async with gate:
                completion = await stack.generate(
                    PROMPT, max_new_tokens=NUM_TOKENS, seed=seed, ignore_eos=True, **options
                )
                return completion.token_ids

        return Counter(await asyncio.gather(*(draw(seed) for seed in range(num_samples))))


def p_value(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square of the counts against the law; outcomes expected fewer than 5 times are pooled."""
    if set(counts) - set(law):
        return 0.0
    num_samples = counts.total()
    common = [outcome for outcome, mass in law.items() if mass * num_samples >= 5]
    observed = [counts[outcome] for outcome in common]
    expected = [law[outcome] * num_samples for outcome in common]
    observed.append(num_samples - sum(observed))
    expected.append(num_samples - sum(expected))
    if expected[-1] < 5:
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    return float(stats.chisquare(observed, np.array(expected) * (sum(observed) / sum(expected))).pvalue)


async def check_law(pair: tuple[Path, Path], redis_url: str, mode: str, name: str, num_samples: int) -> None:
    options = FILTERS[name]
    law = joint_law(pair[0], LawParams(**options))
    counts = await sample(pair, redis_url, num_samples, {**options, "mode": mode, "gamma": 2})
    value = p_value(counts, law)
    print(f"{mode} {name}: p = {value:.3g} over {num_samples} samples, {len(law)} outcomes")
    assert value > FALSE_ALARM / len(CASES)


@pytest.mark.parametrize(
    ("mode", "name"), [("rejection", "plain"), ("block", "penalties_and_bias"), ("coupled", "min_p")]
)
async def test_three_tokens_follow_the_targets_joint_law(
    pair: tuple[Path, Path], redis_url: str, mode: str, name: str
) -> None:
    await check_law(pair, redis_url, mode, name, 1500)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("mode", "name"), CASES)
async def test_three_tokens_follow_the_targets_joint_law_for_every_mode_and_filter(
    pair: tuple[Path, Path], redis_url: str, mode: str, name: str
) -> None:
    await check_law(pair, redis_url, mode, name, 4000)


async def test_the_drafts_own_law_would_be_noticed(pair: tuple[Path, Path], redis_url: str) -> None:
    """Negative control: the samples follow neither the draft's law nor the target's at another temperature."""
    counts = await sample(pair, redis_url, 1500, {"temperature": 1.0, "mode": "rejection", "gamma": 2})
    assert p_value(counts, joint_law(pair[1], LawParams())) < FALSE_ALARM / len(CASES)
    assert p_value(counts, joint_law(pair[0], LawParams(temperature=0.8))) < FALSE_ALARM / len(CASES)
