"""The Triton kernels without a GPU: interpreted, in few programs, and on tapes. Called by tests and `rank_rig`.

Triton's interpreter takes some milliseconds for each program, whatever its size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from specdec.engine.cuda_graphs import fused_operations, paged_attention
from specdec.engine.cuda_graphs.paged_attention import ContextSplit
from specdec.engine.linear import row_products
from specdec.engine.linear.row_products import Tiling, tiling
from specdec.engine.options import CompileOptions
from tests.support.cuda_graphs_rig import CountedCapture, Tape, record_on_tape

#: Steps with CUDA graphs, with either attention, are replayed from a tape here.
WAYS = ("native", "eager", "cuda-graphs", "cuda-graphs, paged")


@contextmanager
def running(way: str) -> Iterator[CompileOptions]:
    """Yield the options of a worker that runs steps of up to five rows in one of `WAYS`."""
    if not way.startswith("cuda-graphs"):
        yield CompileOptions(way)
        return
    attention = None
    if way.endswith("paged"):
        require_interpreter()
        attention = "paged"
    with cheap_recordings():
        yield CompileOptions("cuda-graphs", (1, 5), capture=CountedCapture(record_on_tape), attention=attention)


def num_replays(compiling: CompileOptions) -> int:
    """Return the number of replays so far."""
    return compiling.capture.num_replays if isinstance(compiling.capture, CountedCapture) else 0


_FEW_TILES = fused_operations.ProgramSizes(rows=64, heads=512, numbers=1 << 14)
_FEW_SPLITS = ContextSplit(tile_keys=64, unit_tiles=1, num_splits=1, tile_outputs=64)


@contextmanager
def few_programs() -> Iterator[None]:
    """Use one program for all outputs of a layer and one for a whole context; rows and inputs are tiled as usual."""

    def wide(num_rows: int, dtype: torch.dtype) -> Tiling:
        return replace(tiling(num_rows, dtype), outputs=256)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "ContextSplit", lambda: _FEW_SPLITS)
        patch.setattr(fused_operations, "ProgramSizes", lambda: _FEW_TILES)
        patch.setattr(row_products, "tiling", wide)
        yield


@contextmanager
def kernels_on_tape() -> Iterator[None]:
    """Put the Triton kernels on tapes too; a replay launches them with the same arguments, as a graph does."""
    launches = {paged_attention: ("paged_attention",), fused_operations: ("normalise", "rotate", "gated"),
                row_products: ("multiply",)}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for module, names in launches.items():
            for name in names:
                patch.setattr(module, name, _on_tape(getattr(module, name)))
        yield


def _on_tape(launch: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def launch_on_tape(*args: Any, **kwargs: Any) -> torch.Tensor:
        tape = _get_current_dispatch_mode()
        if not isinstance(tape, Tape):
            return launch(*args, **kwargs)
        with _disable_current_modes():
            noted: torch.Tensor = tape.note(launch, args, kwargs)
            return noted

    return launch_on_tape


@contextmanager
def cheap_recordings() -> Iterator[None]:
    """Record steps of one and two sequences only, with the Triton kernels on tapes and in few programs."""
    with few_programs(), kernels_on_tape(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.engine.cuda_graphs.buckets._NUM_SEQUENCES", (1, 2))
        yield


def require_interpreter() -> None:
    """Skip a test if Triton is missing or would compile the kernels instead of interpreting them."""
    pytest.importorskip("triton", reason="Triton is not installed here: its kernels were not interpreted")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled on this machine: see tests/gpu")
