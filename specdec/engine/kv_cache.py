"""The paged KV cache: one pool of blocks per layer, and how a step's keys and values enter and leave it.

Not an allocator: which sequence owns which block is decided above (`engine.block_manager`); here block ids are only
addresses. Called by `engine.attention` and built by `engine.hf_adapter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.types import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer caches per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def row_width(self) -> int:
        """Numbers per token: keys of all heads, then values of all heads."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class LayerKv:
    """One layer's pool.

    `blocks` is [num_blocks, BLOCK_TOKENS * row_width]; a token's row holds its keys of all heads, then its values, so
    that one copy moves both. Positions [16 * i, 16 * i + 16) of a sequence lie in the block `block_table[i]`.
    """

    def __init__(self, shape: LayerShape, blocks: torch.Tensor) -> None:
        self.shape = shape
        self.blocks = blocks
        self.rows = blocks.view(-1, shape.row_width)  # [num_blocks * BLOCK_TOKENS, row_width]
        self._keys_width = shape.num_kv_heads * shape.key_dim

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores T tokens at `slots` (block id * BLOCK_TOKENS + offset); key and value are [T, num_kv_heads, dim]."""
        self.write_rows(slots, torch.cat((key.flatten(1), value.flatten(1)), dim=1))

    def write_rows(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """The same for tokens whose keys and values lie as the pool stores them: rows [T, row_width]."""
        self.rows.index_copy_(0, slots, rows)

    def read_blocks(self, block_ids: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies `block_ids` [batch * n] out; see `split` for what comes back."""
        return self.split(self.blocks.index_select(0, block_ids).view(batch, -1, self.shape.row_width))

    def view_run(self, first_slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for `length` tokens of one sequence whose blocks lie side by side, without copying."""
        return self.split(self.rows[first_slot : first_slot + length].unsqueeze(0))

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, L, row_width] -> keys and values, each [B, num_kv_heads, L, dim] (strided views)."""
        batch, length, _ = rows.shape
        keys = rows[..., : self._keys_width].view(batch, length, self.shape.num_kv_heads, self.shape.key_dim)
        values = rows[..., self._keys_width :].view(batch, length, self.shape.num_kv_heads, self.shape.value_dim)
        return keys.transpose(1, 2), values.transpose(1, 2)


class KvCache:
    """All layers' pools, `num_blocks` blocks each."""

    def __init__(
        self, shapes: Sequence[LayerShape], *, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.layers = [
            LayerKv(shape, _zeros(num_blocks, BLOCK_TOKENS * shape.row_width, dtype, device)) for shape in shapes
        ]


def block_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return sum(shape.row_width for shape in shapes) * BLOCK_TOKENS * dtype.itemsize


def _zeros(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that, on a CPU, occupy memory only once written: a pool is sized for the worst case.

    They must be zeros, not whatever was there: masked positions are read, and a NaN survives a mask.
    """
    if device.type != "cpu":
        return torch.zeros(rows, columns, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((rows, columns * dtype.itemsize), dtype=np.uint8)).view(dtype)
