"""Our kernels in few programs: Triton's interpreter takes milliseconds for each, whatever its size. Called by tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from specdec.engine.captured import fused_operations, paged_attention, row_products
from specdec.engine.captured.paged_attention import Splitting
from specdec.engine.captured.row_products import Tiling, tiling

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
