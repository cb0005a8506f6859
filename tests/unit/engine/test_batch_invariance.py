"""`--deterministic`: a row's logits have the same bits in any batch, or the model is refused.

The kernels of a GPU run here in Triton's interpreter; the native kernels of a CPU have separate tests.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.contract.errors import Unsupported
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.cuda_graphs import paged_attention
from specdec.engine.linear import row_products
from specdec.engine.linear.row_products import tiling
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from tests.support.cuda_graphs_rig import MIXED_LAYERS, NUM_BLOCKS, CountedCapture, build, piece, random_tokens
from tests.support.interpreted_kernels import few_programs
from tests.support.tiny_models import build_tiny_model

pytest.importorskip("triton", reason="Triton is not installed here: its kernels were not interpreted")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled on this machine: see tests/gpu"
)

START, END = 37, 42


@pytest.fixture(scope="module", autouse=True)
def cheaply() -> Iterator[None]:
    with few_programs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.engine.cuda_graphs.buckets._NUM_SEQUENCES", (1, 2, 4))
        yield


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with layers with and without a window."""
    return build("qwen3", tmp_path_factory.mktemp("mixed"), config_overrides=MIXED_LAYERS)


def load(directory: Path, backend: str = "cuda-graphs", dtype: str = "bfloat16", **options: Any) -> Worker:
    capture = CountedCapture(warms_up=False) if backend == "cuda-graphs" else None
    compiling = CompileOptions(backend, (1, 5), **({"capture": capture, "is_deterministic": True} | options))
    return load_worker(
        LoadRequest(
            str(directory), device="cpu", dtype=dtype, num_kv_blocks=NUM_BLOCKS, compiling=compiling, self_check=False
        )
    )


@pytest.fixture(scope="module")
def worker(mixed: Path) -> Worker:
    return load(mixed)


def tables() -> list[tuple[int, ...]]:
    ids = list(range(NUM_BLOCKS))
    random.Random(1).shuffle(ids)
    return [tuple(ids[first : first + 6]) for first in range(0, 60, 6)]


class Sessions:
    """The tested session and five others: some are in the middle of a text, some read a prompt."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.tokens = [random_tokens(seed, 90) for seed in range(6)]
        self.tables = tables()
        for index in range(1, 6):
            if self.done(index):
                self.run((index, 0, self.done(index)))

    @staticmethod
    def done(index: int) -> int:
        """Return the number of tokens that another session has already run."""
        return (0, 20, 33, 0, 47, 9)[index % 6]

    def run(self, *spans: tuple[int, int, int]) -> torch.Tensor:
        """Run pieces (session, from, to); return the logits of all rows of session 0."""
        slices: list[SequenceSlice] = []
        for index, start, end in spans:
            rows = end - start if index == 0 else 1
            slices.append(piece(self.tokens[index], start, end, self.tables[index], rows))
        logits = self._worker.execute(StepPlan(tuple(slices))).split([one.num_logit_rows for one in slices])
        own = [rows for rows, (index, *_) in zip(logits, spans, strict=True) if index == 0]
        return torch.cat([*own, logits[0][:0]])

    def others(self, count: int) -> list[tuple[int, int, int]]:
        """Return draft steps, verifications and prompt chunks of other sessions in turn."""
        return [(index, self.done(index), self.done(index) + (1, 5, 12)[index % 3]) for index in range(1, count + 1)]


@pytest.fixture(scope="module")
def sessions(worker: Worker) -> Sessions:
    """Return sessions whose steps store the same KV each time they run."""
    return Sessions(worker)


def test_a_verification_has_the_bits_of_single_rows_in_any_batch(sessions: Sessions) -> None:
    """Batches have 1, 2, 4 and 6 sessions: each size that is recorded, and one beyond them. The tested session is
    alone, first, in the middle and last."""
    sessions.run((0, 0, START))
    alone = torch.cat([sessions.run((0, position, position + 1)) for position in range(START, END)])
    for count in (0, 1, 3, 5):
        others = sessions.others(count)
        place = count // 2 if count % 2 else len(others)
        spans: Sequence[tuple[int, int, int]] = (*others[:place], (0, START, END), *others[place:])
        assert torch.equal(sessions.run(*spans), alone), count + 1


def test_a_prompt_has_the_same_bits_whole_in_chunks_and_beside_other_sessions(sessions: Sessions) -> None:
    whole = sessions.run((0, 0, END))
    cuts = (0, 1, 18, END)
    parts = [sessions.run(*sessions.others(3), (0, start, end)) for start, end in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


def test_logits_are_not_rounded_to_the_sixteen_bits_of_the_model(sessions: Sessions) -> None:
    logits = sessions.run((0, 0, 20))
    assert logits.dtype == torch.float32
    assert (logits.to(torch.bfloat16) != logits).float().mean() > 0.9


@pytest.mark.full
def test_int8_weights_are_batch_invariant_too(mixed: Path) -> None:
    """The check at start accepts them."""
    load(mixed, dtype="int8")


def test_products_that_depend_on_the_number_of_rows_are_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the check at start."""

    def deeper(num_rows: int, dtype: torch.dtype) -> row_products.Tiling:
        return replace(tiling(num_rows, dtype), outputs=256, inputs=16 if num_rows > 16 else 32)

    monkeypatch.setattr(row_products, "tiling", deeper)
    # In float32, because rounding to 16 bits hides the difference in such a small model.
    build_tiny_model("llama", tmp_path, vocabulary_size=96, context=256, num_layers=1)
    with pytest.raises(Unsupported, match="deterministic is not possible with this model on this device"):
        load(tmp_path, dtype="float32")


def test_deterministic_steps_do_not_fall_back_to_gathered_attention(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no such architecture")

    monkeypatch.setattr(paged_attention, "paged_attention", failing)
    with pytest.raises(Unsupported, match="recording CUDA graphs failed: --deterministic needs paged attention") as no:
        load(mixed)
    assert no.value.field == "deterministic"


@pytest.mark.parametrize(
    ("architecture", "options", "words"),
    [
        ("gpt2", {}, "a model of type gpt2 cannot run as CUDA graphs"),
        ("llama", {"backend": "eager"}, "--deterministic on cpu needs native kernels, not --compile-backend eager"),
    ],
)
def test_settings_that_cannot_be_batch_invariant_are_refused_by_name(
    architecture: str, options: dict[str, str], words: str, tmp_path: Path
) -> None:
    build_tiny_model(architecture, tmp_path, vocabulary_size=96, context=256)
    with pytest.raises(Unsupported) as refusal:
        load(tmp_path, **options)
    assert words in refusal.value.message
    assert refusal.value.field == "deterministic"
