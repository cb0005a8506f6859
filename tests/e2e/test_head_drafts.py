"""Targets that draft with heads, through running services: exact in every mode, and short rounds where heads are good.

As tests/e2e/test_local_drafts.py does for early exits: greedy output against Hugging Face's `generate()`, the joint law
of three sampled tokens against the enumerated one. Heads that mean nothing are as exact as others: only q is theirs.
False alarms: 1e-4 over all cases together.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import numpy as np
import pytest

from specdec.contract.types import SamplingFilters
from specdec.engine.base import Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.settings.draft_specs import LocalDraftSpec
from tests.e2e.test_local_drafts import (
    FILTERS,
    GAMMA,
    MODES,
    NUM_GREEDY_SAMPLES,
    NUM_QUICK_SAMPLES,
    VOCABULARY,
    joint_law,
    sample,
)
from tests.e2e.test_sampled_law import FALSE_ALARM, NUM_LONG_SAMPLES, p_value
from tests.support.head_checkpoints import (
    as_speculators,
    eagle3_config,
    eagle3_tensors,
    medusa_tensors,
    write_eagle3,
    write_medusa,
)
from tests.support.model_stack import ModelStack
from tests.support.mtp_checkpoints import build_mtp_checkpoint
from tests.support.target_alone import TargetAlone
from tests.support.tiny_models import build_tiny_model, save_tokenizer

WIDTH, NUM_LAYERS = 64, 3
KINDS = ("medusa", "eagle3", "mtp")
#: "off" runs no head: `test_local_drafts` has it.
CASES = tuple(itertools.product(KINDS, [mode for mode in MODES if mode != "off"], FILTERS))


def build(kind: str, folder: Path, vocabulary_size: int, draft_size: int) -> Path:
    """A target and, where its checkpoint does not bring it, a head of random weights: the target's directory."""
    if kind == "mtp":
        build_mtp_checkpoint("mellum", folder / "target", vocab_size=vocabulary_size)
        save_tokenizer(folder / "target", vocabulary_size)
        return folder / "target"
    build_tiny_model(
        "llama", folder / "target", vocabulary_size=vocabulary_size, logit_spread=1.5, num_layers=NUM_LAYERS
    )
    if kind == "medusa":
        write_medusa(folder / "head", medusa_tensors(WIDTH, vocabulary_size))
    else:
        config = eagle3_config(WIDTH, vocabulary_size, draft_size)
        write_eagle3(folder / "head", as_speculators(config, [1, 2, 3]), eagle3_tensors(config))
    return folder / "target"


def load(kind: str, target: Path, backend: str = "auto") -> Worker:
    path = "" if kind == "mtp" else str(target.parent / "head")
    return load_worker(
        LoadRequest(
            str(target),
            device="cpu",
            dtype="float32",
            num_kv_blocks=512,
            num_threads=1,
            compiling=CompileOptions(backend),
            local_drafts=(LocalDraftSpec(kind, kind, path=path),),
        )
    )


async def check_law(kind: str, mode: str, name: str, tmp_path: Path, num_samples: int) -> None:
    # Of an EAGLE-3 head, a vocabulary of its own that lacks two tokens.
    target = build(kind, tmp_path, VOCABULARY, VOCABULARY - 2)
    filters = FILTERS[name]
    num_samples = num_samples if filters["temperature"] else NUM_GREEDY_SAMPLES
    law = joint_law(target, SamplingFilters(**filters))
    counts, num_drafted = await sample(load(kind, target), target, num_samples, mode=mode, **filters)
    value = p_value(counts, law)
    print(f"{kind} {mode} {name}: p = {value:.3g}, {num_drafted} draft tokens of {num_samples} sessions")
    assert value > FALSE_ALARM / len(CASES)
    assert num_drafted >= GAMMA * num_samples


async def test_three_tokens_follow_the_targets_joint_law(tmp_path: Path) -> None:
    await check_law("eagle3", "rejection", "T=0.7, top-k, top-p", tmp_path, NUM_QUICK_SAMPLES)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "mode", "name"), CASES)
async def test_three_tokens_follow_the_targets_joint_law_in_every_mode(
    kind: str, mode: str, name: str, tmp_path: Path
) -> None:
    await check_law(kind, mode, name, tmp_path, NUM_LONG_SAMPLES)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("medusa", "native"),
        ("eagle3", "native"),
        pytest.param("eagle3", "eager", marks=pytest.mark.full),
        pytest.param("mtp", "auto", marks=pytest.mark.full),
    ],
)
async def test_greedy_output_with_heads_is_hugging_faces(kind: str, backend: str, tmp_path: Path) -> None:
    vocabulary_size = 96
    target = build(kind, tmp_path, vocabulary_size, 40)
    worker, oracle = load(kind, target, backend), TargetAlone(target)
    generator = np.random.default_rng(7)
    prompts = [generator.integers(2, vocabulary_size, 3 + 5 * index).tolist() for index in range(10)]
    expected = [await asyncio.to_thread(oracle.greedy, prompt, 24) for prompt in prompts]
    async with ModelStack(target, worker, {}) as stack:
        outputs = await asyncio.gather(
            *(stack.generate(prompt, max_new_tokens=24, temperature=0.0, gamma=3) for prompt in prompts)
        )
    assert [list(output.token_ids) for output in outputs] == expected
    assert sum(output.stats.num_draft_tokens for output in outputs) > 100
