"""One architecture through the engine and through transformers' own eager forward. Called by tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from specdec.contract.errors import Unsupported
from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice, SliceStates, StepPlan, Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import LoadRequest
from tests.support.tiny_architectures import VOCABULARY_SIZE, WINDOW, build_tiny_architecture
from tests.support.tiny_models import EOS_TOKEN_ID, UNK_TOKEN_ID

NUM_BLOCKS = 16
#: Largest difference of two logits, against the spread of all: float32 rounding stays two orders below.
TOLERANCE = 1e-3
_TABLES = ((3, 11, 7, 1, 14), (9, 2, 15, 6, 4))
_LENGTHS = (3 * WINDOW, 2 * WINDOW + 9)
_NUM_GREEDY = 12


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one architecture; a wrong one is an AssertionError."""

    model_type: str
    refusal: str = ""
    """The message of `Unsupported`; empty: right."""
    worst: float = 0.0
    """Largest relative difference of two logits."""
    is_cache_right: bool = True
    """Whether transformers' own cache gives the text that its forward pass does."""


def judge(model_type: str, directory: Path, *, seed: int = 0) -> Verdict:
    """Builds, loads and compares.

    Raises:
        CannotBuild: transformers makes no tiny model of this type.
        AssertionError: the engine computes something else than transformers does.
    """
    model = build_tiny_architecture(model_type, directory, seed=seed)
    try:
        worker = load_worker(LoadRequest(str(directory), device="cpu", dtype="float32", num_kv_blocks=NUM_BLOCKS))
    except Unsupported as refusal:
        return Verdict(model_type, refusal=refusal.message)
    worst = compare_logits(worker, model, seed=seed)
    assert worst < TOLERANCE, f"{model_type}: logits differ by {worst:.2g} of their spread"
    return Verdict(model_type, worst=worst, is_cache_right=compare_text(worker, model))


@torch.no_grad()
def compare_logits(worker: Worker, model: PreTrainedModel, *, seed: int = 0) -> float:
    """Chunks, then single tokens of two sessions in one batch; largest difference in units of the logits' spread."""
    rng = random.Random(seed)
    sequences = [[rng.randrange(2, VOCABULARY_SIZE) for _ in range(length)] for length in _LENGTHS]
    expected = [model(torch.tensor([tokens])).logits[0, :, :VOCABULARY_SIZE].float() for tokens in sequences]
    spread = float(torch.cat(expected).std())
    worst = 0.0
    for spans in _steps():
        slices = tuple(_piece(sequences[index], start, end, index) for index, start, end in spans)
        rows = torch.cat([expected[index][start:end] for index, start, end in spans])
        worst = max(worst, float((worker.execute(StepPlan(slices)) - rows).abs().max()))
    assert spread > 0
    return worst / spread


def _steps() -> Iterator[tuple[tuple[int, int, int], ...]]:
    """(sequence, from, to) of every slice of every step."""
    first, second = _LENGTHS
    yield ((0, 0, 7),)
    yield (0, 7, 40), (1, 0, 20)
    yield (1, 20, 23), (0, 40, 45)
    for offset in range(20):
        yield (0, 45 + offset, 46 + offset), (1, 23 + offset, 24 + offset)
    yield (0, 65, first), (1, 43, 48)
    yield ((1, 48, second),)


def _piece(tokens: list[int], start: int, end: int, index: int) -> SequenceSlice:
    blocks, count = _TABLES[index][: -(-end // BLOCK_TOKENS)], end - start
    states = SliceStates(index if start else None, ((count, index),))
    return SequenceSlice(tuple(tokens[start:end]), start, blocks, count, states=states)


@torch.no_grad()
def compare_text(worker: Worker, model: PreTrainedModel) -> bool:
    """Greedy text of the engine is that of `generate()`.

    Returns:
        False where transformers disagrees with itself: its `generate()` has that text only without a cache.
    """
    prompt = [2 + (7 * index) % (VOCABULARY_SIZE - 2) for index in range(WINDOW + 9)]
    texts = [_generate(model, prompt, use_cache=use_cache) for use_cache in (True, False)]
    tokens, done = list(prompt), 0
    for _ in texts[-1]:
        logits = worker.execute(StepPlan((_piece(tokens, done, len(tokens), 0),)))[-1]
        done = len(tokens)
        tokens.append(int(logits.argmax()))
    assert tokens[len(prompt) :] == texts[-1]
    return texts[0] == texts[1]


def _generate(model: PreTrainedModel, prompt: list[int], *, use_cache: bool) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=_NUM_GREEDY,
        do_sample=False,
        use_cache=use_cache,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=UNK_TOKEN_ID,
    )
    return output[0, len(prompt) :].tolist()
