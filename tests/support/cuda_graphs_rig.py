"""Eager workers and workers with CUDA graphs side by side, with or without a GPU. Called by tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import Capture, CompileOptions, LoadRequest
from tests.support.tiny_models import SLIDING_WINDOW, build_tiny_model

VOCABULARY_SIZE = 96
NUM_BLOCKS = 64
#: Two contexts have buckets of their own: up to 512 tokens, and up to all.
CONTEXT = 800
WIDTHS = (1, 3, 5)
#: A padded row of the embedding, so no token of the vocabulary; its keys and values are NaN in every layer.
NAN_TOKEN_ID = VOCABULARY_SIZE + 1
MIXED_LAYERS = {
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": SLIDING_WINDOW,
    "max_window_layers": 1,
}


class CountedCapture:
    """A `specdec.engine.options.Capture` that counts recordings and replays.

    Without an inner capture a replay calls the step again, which tests everything except the recording.
    """

    def __init__(self, inner: Capture | None = None, *, warms_up: bool = True) -> None:
        """`warms_up`: whether to run a step when it would be recorded, which may be slow."""
        self._inner = inner
        self._warms_up = warms_up
        self.num_recorded = 0
        self.num_replays = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        if self._inner is None:
            if self._warms_up:
                step()
            run_again = step
        else:
            run_again = self._inner(step)
        self.num_recorded += 1

        def replay() -> None:
            self.num_replays += 1
            run_again()

        return replay


class Tape(TorchDispatchMode):
    """Records operations as a CUDA graph does and replays them on the same tensors.

    Numbers that a step takes from the host while it is recorded stay as they are. Operations that would wait for a CUDA
    device are refused: reads of its numbers, sizes that depend on them, and tensors made of numbers of the host.
    """

    _REFUSED = frozenset(
        ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "lift_fresh")
    )

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operation.overloadpacket.__name__
        is_by_mask = name in ("index", "index_put_") and any(
            isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1])
        )
        if name in self._REFUSED or is_by_mask:
            raise RuntimeError(f"{operation} cannot be recorded")
        result = operation(*args, **kwargs)
        self._operations.append((operation, args, kwargs, result))
        return result

    def note(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that is not a PyTorch operation, and put it on the tape."""
        result = function(*args, **kwargs)
        self._operations.append((function, args, kwargs, result))
        return result

    def replay(self) -> None:
        for operation, args, kwargs, recorded in self._operations:
            result = operation(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(result), strict=True):
                if isinstance(new, torch.ScriptObject):  # a collective of ranks, which is awaited outside of operations
                    new.wait()  # type: ignore[attr-defined]
                elif isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)


def record_on_tape(step: Callable[[], None]) -> Callable[[], None]:
    """Record a step on a tape: a `Capture` for any device."""
    with torch.inference_mode(), Tape() as tape:
        step()

    def replay() -> None:
        with torch.inference_mode():
            tape.replay()

    return replay


def build(architecture: str, directory: Path, **options: object) -> Path:
    build_tiny_model(
        architecture,
        directory,
        vocabulary_size=VOCABULARY_SIZE,
        padded_rows=8,
        num_layers=2,
        context=CONTEXT,
        gain=1.0,
        logit_spread=1.0,
        **options,
    )
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.get_input_embeddings().weight.data[NAN_TOKEN_ID] = torch.nan
    model.save_pretrained(directory)
    return directory


def load(
    model: Path,
    backend: str = "cuda-graphs",
    *,
    device: str = "cpu",
    dtype: str = "float32",
    self_check: bool = True,
    **options: object,
) -> Worker:
    compiling = CompileOptions(backend, **({"row_counts": WIDTHS} | options))
    return load_worker(
        LoadRequest(str(model), device=device, dtype=dtype, num_kv_blocks=NUM_BLOCKS, compiling=compiling,
                    self_check=self_check)
    )  # fmt: skip


def piece(tokens: list[int], start: int, end: int, table: tuple[int, ...], num_rows: int) -> SequenceSlice:
    return SequenceSlice(tuple(tokens[start:end]), start, table[: -(-end // BLOCK_TOKENS)], num_rows)


def random_tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCABULARY_SIZE) for _ in range(length)]


class Pair:
    """An eager worker and one with CUDA graphs that run the same steps.

    The comparison of their steps takes the place of the self-check, unless a test asks for it.
    """

    def __init__(
        self,
        model: Path,
        *,
        capture: Capture | None = None,
        widths: tuple[int, ...] = WIDTHS,
        atol: float = 1e-4,
        device: str = "cpu",
        dtype: str = "float32",
        attention: str | None = None,
        self_check: bool = False,
    ) -> None:
        self.capture = capture if isinstance(capture, CountedCapture) else CountedCapture(capture)
        self.eager = load(model, "eager", device=device, dtype=dtype, self_check=self_check)
        self.recorded = load(
            model, device=device, dtype=dtype, self_check=self_check, capture=self.capture, row_counts=widths,
            attention=attention,
        )  # fmt: skip
        self.tables = self._tables()
        self._atol = atol

    def _tables(self) -> list[tuple[int, ...]]:
        ids = list(range(NUM_BLOCKS))
        random.Random(1).shuffle(ids)
        return [tuple(ids[:40]), tuple(ids[40:50]), tuple(ids[50:56]), tuple(ids[56:])]

    def run(self, *slices: SequenceSlice, uses_cuda_graphs: bool = True) -> torch.Tensor:
        """Run one step on both workers; the logits must be equal except for rounding."""
        before = self.capture.num_replays
        expected, actual = (worker.execute(StepPlan(slices)) for worker in (self.eager, self.recorded))
        assert self.capture.num_replays - before == uses_cuda_graphs
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected, rtol=0, atol=self._atol, equal_nan=True)
        return actual


def check_ragged_steps(pair: Pair, num_steps: int = 20) -> None:
    """Run four sequences of very different contexts, in steps of mixed widths, across block boundaries."""
    rng = random.Random(2)
    done = [560, 40, 3, 0]
    sequences = [random_tokens(seed, length + 60) for seed, length in enumerate(done)]
    for tokens, length, table in zip(sequences, done, pair.tables, strict=True):
        if length:
            pair.run(piece(tokens, 0, length, table, 0), uses_cuda_graphs=length <= max(WIDTHS))
    for _ in range(num_steps):
        chosen = sorted(rng.sample(range(4), rng.randint(1, 4)))
        slices = []
        for index in chosen:
            end = min(done[index] + rng.randint(1, max(WIDTHS)), len(sequences[index]))
            start = min(done[index], end - 1)
            slices.append(piece(sequences[index], start, end, pair.tables[index], rng.randint(0, end - start)))
            done[index] = end
        pair.run(*slices)
