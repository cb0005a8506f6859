"""A target that drafts with its own first layers, through running services: its output is its own, in every mode.

Greedy output is compared with Hugging Face's `generate()`, the joint law of the first three tokens with the one that is
enumerated from Hugging Face's logits. The prompt is a block and one token: every session but the first finds the block,
so that it drafts from its first round on. False alarms: 1e-4 over all cases together.
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
import torch
from safetensors.torch import save_file

from coordinator.round import answers
from specdec.contract.types import SamplingFilters, Support, Verification, VerifyRequest
from specdec.engine.base import Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.settings.draft_specs import LocalDraftSpec
from target_service.verifier import Verifier
from tests.e2e.test_sampled_law import FALSE_ALARM, NUM_LONG_SAMPLES, NUM_TOKENS, p_value
from tests.support.model_stack import ModelStack
from tests.support.target_alone import TargetAlone
from tests.support.tiny_models import build_tiny_model

VOCABULARY = 6
PROMPT = (2, 3, 4, 5, 3, 2, 5, 4, 4, 3, 2, 5, 5, 2, 3, 4, 3)
GAMMA = 2
#: Enough for the negative control.
NUM_QUICK_SAMPLES = 400
#: Of a law with one outcome more sessions say nothing.
NUM_GREEDY_SAMPLES = 64
NUM_LAYERS = 3
FILTERS: dict[str, dict[str, Any]] = {
    "T=0": {"temperature": 0.0},
    "T=0.7, top-k, top-p": {"temperature": 0.7, "top_k": 4, "top_p": 0.9},
    "T=1": {"temperature": 1.0},
    "T=1, top-k, top-p": {"temperature": 1.0, "top_k": 5, "top_p": 0.95},
}
MODES = ("rejection", "block", "coupled", "off")
CASES = tuple(itertools.product(MODES, FILTERS, ("native", "eager")))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(
        "llama", tmp_path_factory.mktemp("few"), vocabulary_size=VOCABULARY, logit_spread=1.5, num_layers=NUM_LAYERS
    )


def load(target: Path, backend: str = "auto", exits: tuple[LocalDraftSpec, ...] = ()) -> Worker:
    return load_worker(
        LoadRequest(
            str(target),
            device="cpu",
            dtype="float32",
            num_kv_blocks=512,
            compiling=CompileOptions(backend),
            local_drafts=exits or (LocalDraftSpec("early-exit", "early-exit", NUM_LAYERS - 1),),
        )
    )


def joint_law(target: Path, filters: SamplingFilters) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of three tokens."""
    alone = TargetAlone(target)
    prefixes = {(): 1.0}
    for _ in range(NUM_TOKENS):
        prefixes = {
            (*prefix, token_id): mass * float(share)
            for prefix, mass in prefixes.items()
            for token_id, share in enumerate(alone.law([*PROMPT, *prefix], filters, len(PROMPT)))
            if share > 0
        }
    return prefixes


async def sample(
    worker: Worker, target: Path, num_samples: int, verifier_type: type[Verifier] = Verifier, **options: Any
) -> tuple[Counter[tuple[int, ...]], int]:
    """Return the outputs of `num_samples` seeds, counted, and the number of draft tokens."""
    async with ModelStack(target, worker, {}, verifier_type=verifier_type) as stack:
        gate = asyncio.Semaphore(64)

        async def draw(seed: int) -> Any:
            async with gate:
                return await stack.generate(
                    PROMPT, max_new_tokens=NUM_TOKENS, seed=seed, ignore_eos=True, gamma=GAMMA, **options
                )

        await draw(0)
        outputs = await asyncio.gather(*(draw(seed) for seed in range(num_samples)))
    num_drafted = sum(output.stats.num_draft_tokens for output in outputs)
    return Counter(tuple(output.token_ids) for output in outputs), num_drafted


async def check_law(target: Path, mode: str, name: str, backend: str, num_samples: int) -> None:
    filters = FILTERS[name]
    num_samples = num_samples if filters["temperature"] else NUM_GREEDY_SAMPLES
    law = joint_law(target, SamplingFilters(**filters))
    counts, num_drafted = await sample(load(target, backend), target, num_samples, mode=mode, **filters)
    value = p_value(counts, law)
    print(f"{mode} {name}, {backend}: p = {value:.3g}, {num_drafted} draft tokens of {num_samples} sessions")
    assert value > FALSE_ALARM / len(CASES)
    assert num_drafted == 0 if mode == "off" else num_drafted >= GAMMA * num_samples


async def test_three_tokens_follow_the_targets_joint_law(target: Path) -> None:
    await check_law(target, "block", "T=0.7, top-k, top-p", "native", NUM_QUICK_SAMPLES)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("mode", "name", "backend"), CASES)
async def test_three_tokens_follow_the_targets_joint_law_in_every_mode(
    target: Path, mode: str, name: str, backend: str
) -> None:
    await check_law(target, mode, name, backend, NUM_LONG_SAMPLES)


class MisstatesLocalDrafts(Verifier):
    """Says of every token that it drafted that it was most unlikely, so that it is always accepted."""

    async def verify(self, request: VerifyRequest) -> Verification:
        verification = await super().verify(request)
        drafted = verification.drafted
        if drafted is None:
            return verification
        stated = []
        for token_id, support in zip(drafted.draft_token_ids, drafted.supports, strict=True):
            weights = np.where(support.token_ids == token_id, 1, 65_535).astype(np.uint16)
            stated.append(Support(support.token_ids, weights))
        return replace(verification, drafted=replace(drafted, supports=tuple(stated)))


async def test_a_local_draft_with_a_wrong_q_would_be_detected(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, with a coordinator that does not draw the tokens again."""
    monkeypatch.setattr(answers, "check_drawn", lambda *_: None)
    options = {"mode": "rejection", "temperature": 1.0}
    counts, _ = await sample(load(target), target, NUM_QUICK_SAMPLES, MisstatesLocalDrafts, **options)
    assert p_value(counts, joint_law(target, SamplingFilters())) < FALSE_ALARM / len(CASES)


def write_adapter(directory: Path, weight: torch.Tensor, bias: torch.Tensor, num_layers: int) -> Path:
    path = directory / "adapter.safetensors"
    save_file({"weight": weight.contiguous(), "bias": bias}, path, metadata={"num_layers": str(num_layers)})
    return path


@pytest.mark.parametrize(
    ("architecture", "backend"),
    [
        ("llama", "native"),
        pytest.param("llama", "eager", marks=pytest.mark.full),
        pytest.param("gpt2", "auto", marks=pytest.mark.full),
        ("gemma3", "auto"),
    ],
)
async def test_greedy_output_with_local_drafts_is_hugging_faces(
    architecture: str, backend: str, tmp_path: Path
) -> None:
    """Both an identity adapter and a random one leave greedy text unchanged."""
    directory = build_tiny_model(architecture, tmp_path, num_layers=NUM_LAYERS)
    width = TargetAlone(directory)._model.get_input_embeddings().weight.shape[1]
    noise = torch.Generator().manual_seed(1)
    shaken = torch.eye(width) + 0.05 * torch.randn(width, width, generator=noise)
    specs = tuple(
        LocalDraftSpec(name, "early-exit", NUM_LAYERS - 1, str(write_adapter(folder, weight, bias, NUM_LAYERS - 1)))
        for name, weight, bias in (
            ("identity", torch.eye(width), torch.zeros(width)),
            ("noise", shaken, torch.randn(width, generator=noise)),
        )
        if (folder := tmp_path / name).mkdir() is None
    )
    specs = (LocalDraftSpec("plain", "early-exit", NUM_LAYERS - 1), *specs)
    worker = load(directory, backend, specs)
    oracle = TargetAlone(directory)
    generator = np.random.default_rng(7)
    prompts = [generator.integers(2, worker.shape.vocabulary_size, 3 + 5 * index).tolist() for index in range(10)]
    expected = [await asyncio.to_thread(oracle.greedy, prompt, 32) for prompt in prompts]
    num_accepted = {}
    async with ModelStack(directory, worker, {}) as stack:
        for spec in specs:
            outputs = await asyncio.gather(
                *(
                    stack.generate(prompt, max_new_tokens=32, temperature=0.0, gamma=3, draft_pool=spec.name)
                    for prompt in prompts
                )
            )
            assert [list(output.token_ids) for output in outputs] == expected
            num_accepted[spec.name] = sum(output.stats.num_accepted_tokens for output in outputs)
    print(f"{architecture} {backend}: accepted {num_accepted} of {32 * len(prompts)} tokens")
    assert num_accepted["plain"] > 10
    assert abs(num_accepted["identity"] - num_accepted["plain"]) <= 2
    assert num_accepted["noise"] < num_accepted["plain"]
