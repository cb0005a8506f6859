"""Greedy output of the whole system equals Hugging Face `generate()`, token for token, for every architecture.

fp32. The draft of each tiny target is a perturbed copy of itself, so drafts are really accepted and rejected. A
difference passes only where a tie (top two logits within 1e-4) is its first position, and is printed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.client import Completion
from specdec.engine.hf_adapter import load_worker
from specdec.types import TokenSource
from tests.model_stack import ModelStack
from tests.tiny_models import ARCHITECTURES, build_tiny_pair

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
BENCH_PROMPTS = sorted((Path(__file__).resolve().parents[2] / "bench" / "prompts").glob("*.txt"))
PROMISED = ("demo", *ARCHITECTURES[:10])
TIE = 1e-4
NUM_AT_ONCE = 16


@dataclass(frozen=True)
class Size:
    num_prompts: int
    num_tokens: int


QUICK = Size(num_prompts=8, num_tokens=48)
LONG = Size(num_prompts=20, num_tokens=128)


def checkpoints(case: str, directory: Path) -> tuple[Path, Path]:
    if case == "demo":
        return DEMO / "target", DEMO / "draft"
    return build_tiny_pair(case, directory)


def prompts(case: str, vocabulary_size: int, size: Size) -> list[list[int]]:
    """Prompt i, of a length of its own."""
    if case == "demo":
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO / "target")
        return [tokenizer.encode(path.read_text())[-96:] for path in BENCH_PROMPTS[: size.num_prompts]]
    generator = np.random.default_rng(7)
    return [generator.integers(2, vocabulary_size, 3 + 5 * index).tolist() for index in range(size.num_prompts)]


def hugging_face_greedy(model: torch.nn.Module, prompt: Sequence[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


def first_difference_is_a_tie(
    model: torch.nn.Module, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> bool:
    position = next(
        (index for index, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *theirs[:position]]])).logits[0, -1]
    top = logits.topk(2).values
    is_tie = bool(top[0] - top[1] < TIE)
    print(f"differs at {position}: top two logits {float(top[0] - top[1]):.2e} apart{', a tie' if is_tie else ''}")
    return is_tie


def alpha_of(completions: Sequence[Completion]) -> float:
    """Accepted / tested draft tokens."""
    sources = [detail.source for completion in completions for detail in completion.details]
    num_accepted = sources.count(TokenSource.ACCEPTED)
    return num_accepted / (num_accepted + sources.count(TokenSource.CORRECTED))


async def check_parity(case: str, directory: Path, size: Size) -> None:
    target, draft = checkpoints(case, directory)
    worker = load_worker(str(target), device="cpu", dtype="float32", num_kv_blocks=1024)
    draft_worker = load_worker(str(draft), device="cpu", dtype="float32", num_kv_blocks=1024)
    oracle = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    asked = prompts(case, worker.shape.vocabulary_size, size)
    expected = [await asyncio.to_thread(hugging_face_greedy, oracle, prompt, size.num_tokens) for prompt in asked]
    async with ModelStack(target, worker, {"default": draft_worker}) as stack:
        gate = asyncio.Semaphore(NUM_AT_ONCE)

        async def complete(index: int) -> Completion:
            async with gate:
                return await stack.generate(
                    asked[index], max_new_tokens=size.num_tokens, temperature=0.0, gamma=1 + index % 8,
                    mode="rejection", provenance=True,
                )  # fmt: skip

        alone = [await complete(index) for index in range(len(asked))]
        at_once = await asyncio.gather(*(complete(index) for index in range(len(asked))))
    num_ties = 0
    for completions in (alone, at_once):
        for prompt, completion, theirs in zip(asked, completions, expected, strict=True):
            ours = list(completion.token_ids)
            if ours != theirs:
                assert first_difference_is_a_tie(oracle, prompt, ours, theirs)
                num_ties += 1
    alpha = alpha_of(alone)
    print(f"{case}: alpha {alpha:.3f}, {num_ties} ties in {2 * len(asked)} outputs")
    assert num_ties <= 2 * max(1, len(asked) // 20)
    assert 0.3 < alpha < 0.95


@pytest.mark.parametrize("case", PROMISED)
async def test_greedy_output_is_hugging_faces_token_for_token(case: str, tmp_path: Path) -> None:
    await check_parity(case, tmp_path, QUICK)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", PROMISED)
async def test_greedy_output_is_hugging_faces_over_twenty_prompts_of_128_tokens(case: str, tmp_path: Path) -> None:
    await check_parity(case, tmp_path, LONG)


def test_a_real_difference_is_not_excused_as_a_tie(tmp_path: Path) -> None:
    """Negative control: another token at a clear position must not pass."""
    target, _ = build_tiny_pair("llama", tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    theirs = hugging_face_greedy(oracle, [5, 6, 7], 8)
    ours = [*theirs[:4], theirs[4] + 1, *theirs[5:]]
    assert not first_difference_is_a_tie(oracle, [5, 6, 7], ours, theirs)
