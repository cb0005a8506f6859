"""Our kernels where there is no device: in few programs, as Triton's interpreter takes milliseconds for each, whatever
its size, and on tapes. Called by tests and `rank_rig`.
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
from specdec.engine.cuda_graphs.paged_attention import Splitting
from specdec.engine.linear import row_products
from specdec.engine.linear.row_products import Tiling, tiling
from tests.support.cuda_graphs_rig import Tape

_FEW_TILES = fused_operations.Tiling(rows=64, heads=512, numbers=1 << 14)
_FEW_SPLITS = Splitting(tile_keys=64, unit_tiles=1, num_splits=1, tile_outputs=64)


@contextmanager
def few_programs() -> Iterator[None]:
    """Within it, a program makes all outputs of a layer and all of a context; rows and inputs are tiled as ever."""

    def wide(num_rows: int, num_outputs: int, dtype: torch.dtype) -> Tiling:
        return replace(tiling(num_rows, num_outputs, dtype), outputs=256)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "Splitting", lambda: _FEW_SPLITS)
        patch.setattr(fused_operations, "Tiling", lambda: _FEW_TILES)
        patch.setattr(row_products, "tiling", wide)
        yield


@contextmanager
def kernels_on_tape() -> Iterator[None]:
    """Within it, tapes have our kernels too, launched again with the same tensors and numbers, as a graph does it."""
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
    """Within it, steps of one and two sequences are recorded, with our kernels on tapes and in few programs."""
    with few_programs(), kernels_on_tape(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.engine.cuda_graphs.buckets._NUM_SEQUENCES", (1, 2))
        yield


def require_interpreter() -> None:
    """Skips a test that would run our kernels where they are compiled, or where Triton is missing."""
    pytest.importorskip("triton", reason="Triton is not installed here: its kernels were not interpreted")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled on this machine: see tests/gpu")
