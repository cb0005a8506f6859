"""What a seed promises: the same text, whoever else is served and however it was drafted (fp32)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.engine.hf_adapter import load_worker
from tests.model_stack import ModelStack

NUM_SESSIONS = 16

#: Sixteen requests cycle through these: no two sessions at once ask for quite the same.
FILTERS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 1.3, "min_p": 0.02, "frequency_penalty": 0.3, "logit_bias": {7: 2.0}},
)


@asynccontextmanager
async def stack_of(pair: tuple[Path, Path], **drafts: Path) -> AsyncIterator[ModelStack]:
    def worker(path: Path) -> Any:
        return load_worker(str(path), device="cpu", dtype="float32", num_kv_blocks=1024)

    workers = {name: worker(path) for name, path in {"default": pair[1], **drafts}.items()}
    async with ModelStack(pair[0], worker(pair[0]), workers) as stack:
        yield stack


def request_of(index: int, mode: str, *, greedy: bool) -> dict[str, Any]:
    prompt = np.random.default_rng(index).integers(2, 256, 4 + 9 * index).tolist()
    sampling = {"temperature": 0.0} if greedy else FILTERS[index % len(FILTERS)]
    return {
        "prompt_token_ids": prompt, "max_new_tokens": 16 + 3 * index, "seed": 1000 + index, "gamma": 1 + index % 8,
        "mode": mode, "ignore_eos": True, **sampling,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "greedy"),
    [("rejection", True), ("coupled", False), ("off", False), ("rejection", False), ("block", False)],
    ids=["greedy", "coupled", "off", "rejection", "block"],
)
async def test_sixteen_sessions_at_once_emit_what_each_emits_alone(
    llama_pair: tuple[Path, Path], mode: str, greedy: bool
) -> None:
    requests = [request_of(index, mode, greedy=greedy) for index in range(NUM_SESSIONS)]
    async with stack_of(llama_pair) as stack:
        alone = [(await stack.generate(**request)).token_ids for request in requests]
        at_once = [c.token_ids for c in await asyncio.gather(*(stack.generate(**request) for request in requests))]
    assert at_once == alone
    assert len({ids[:16] for ids in alone}) == NUM_SESSIONS, "sessions that are all alike would prove nothing"


@pytest.mark.parametrize("sampling", FILTERS, ids=["plain", "top_k", "top_p", "min_p"])
async def test_coupled_output_is_one_text_for_every_gamma_and_draft_and_for_none(
    llama_pair: tuple[Path, Path], other_draft: Path, sampling: dict[str, Any]
) -> None:
    request: dict[str, Any] = {
        "prompt_token_ids": [9, 8, 7, 6], "max_new_tokens": 64, "seed": 11, "ignore_eos": True, **sampling
    }  # fmt: skip
    async with stack_of(llama_pair, other=other_draft) as stack:
        off = await stack.generate(**request, mode="off")
        coupled = [
            await stack.generate(**request, mode="coupled", gamma=gamma, draft_pool=pool)
            for pool in ("default", "other")
            for gamma in (1, 2, 4, 8, None)
        ]
        other_seed = await stack.generate(**{**request, "seed": 12}, mode="off")
    assert [completion.token_ids for completion in coupled] == [off.token_ids] * len(coupled)
    assert [completion.text for completion in coupled] == [off.text] * len(coupled)
    assert sum(completion.stats.num_accepted_tokens for completion in coupled) > 0
    assert other_seed.token_ids != off.token_ids


async def test_another_gamma_shows_another_draw_of_the_same_law(llama_pair: tuple[Path, Path]) -> None:
    """Negative control of the test above: rejection mode is not one text over gamma."""
    request = {"prompt_token_ids": [9, 8, 7, 6], "max_new_tokens": 64, "seed": 11, "ignore_eos": True}
    async with stack_of(llama_pair) as stack:
        texts = {(await stack.generate(**request, mode="rejection", gamma=gamma)).token_ids for gamma in (1, 2, 4, 8)}
    assert len(texts) > 1
