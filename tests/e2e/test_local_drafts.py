"""A target that drafts with its own first layers or with heads, through running services: greedy output is its own.

It is compared with Hugging Face's `generate()`; adapters and heads of random weights leave it unchanged. Sampled tokens
are compared in `tests/statistical/test_first_tokens.py`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from specdec.settings.draft_specs import LocalDraftSpec
from tests.statistical.first_tokens import NUM_LAYERS, build_target_with_head, load, local_draft
from tests.support.model_stack import ModelStack
from tests.support.target_alone import TargetAlone
from tests.support.tiny_models import build_tiny_model


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
    build_target_with_head(kind, tmp_path, vocabulary_size, num_draft_tokens=40)
    target = tmp_path / "target"
    worker, oracle = load(target, backend, (local_draft(kind, tmp_path),)), TargetAlone(target)
    generator = np.random.default_rng(7)
    prompts = [generator.integers(2, vocabulary_size, 3 + 5 * index).tolist() for index in range(10)]
    expected = [await asyncio.to_thread(oracle.greedy, prompt, 24) for prompt in prompts]
    async with ModelStack(target, worker, {}) as stack:
        outputs = await asyncio.gather(
            *(stack.generate(prompt, max_new_tokens=24, temperature=0.0, gamma=3) for prompt in prompts)
        )
    assert [list(output.token_ids) for output in outputs] == expected
    assert sum(output.stats.num_draft_tokens for output in outputs) > 100
