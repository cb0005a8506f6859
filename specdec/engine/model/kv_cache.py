"""The paged KV cache: one pool of blocks per layer, and how a step's keys and values enter and leave it.

What a layer reads here goes back to `attention`. Not an allocator: which sequence owns which block is decided above
(`engine.sessions.block_manager`); here block ids are only addresses. Called by `engine.model.attention` and built by
`engine.loader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.engine import large_pages
from specdec.engine.model.block_copies import BlockCopies
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

    def clear(self, block_ids: torch.Tensor) -> None:
        """Zeros whole blocks [n]: masked positions are read with the rest, and a former owner's NaN survives a mask."""
        self.blocks.index_fill_(0, block_ids, 0)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Stores T tokens' rows [T, row_width] at `slots` (block id * BLOCK_TOKENS + offset)."""
        self.rows.index_copy_(0, slots, rows)

    def read_blocks(self, block_ids: torch.Tensor, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies `block_ids` [batch * n] out, n * BLOCK_TOKENS = length; see `split` for what comes back."""
        return self.split(self.blocks.index_select(0, block_ids), batch, length)

    def view_run(self, first_slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for `length` tokens of one sequence whose blocks lie side by side, without copying."""
        return self.split(self.rows, 1, length, first_slot)

    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the whole pool as keys and values, each [num_blocks, BLOCK_TOKENS, num_kv_heads, dim]."""
        pages = self.rows.view(-1, BLOCK_TOKENS, self.shape.row_width)
        keys, values = pages.split(
            (self.shape.num_kv_heads * self.shape.key_dim, self.shape.num_kv_heads * self.shape.value_dim), dim=-1
        )
        heads = self.shape.num_kv_heads
        return keys.unflatten(-1, (heads, self.shape.key_dim)), values.unflatten(-1, (heads, self.shape.value_dim))

    def split(
        self, rows: torch.Tensor, batch: int, length: int, first_row: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of contiguous rows as keys and values, each [batch, num_kv_heads, length, dim]."""
        heads, key_dim, value_dim = self.shape.num_kv_heads, self.shape.key_dim, self.shape.value_dim
        width = self.shape.row_width
        # Two views instead of a chain of eight: this runs in every layer of every step.
        start = rows.storage_offset() + first_row * width
        keys = rows.as_strided((batch, heads, length, key_dim), (length * width, key_dim, width, 1), start)
        values = rows.as_strided(
            (batch, heads, length, value_dim), (length * width, value_dim, width, 1), start + heads * key_dim
        )
        return keys, values


class KvCache:
    """All layers' pools, `num_blocks` blocks each."""

    def __init__(
        self, shapes: Sequence[LayerShape], *, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.layers = [
            LayerKv(shape, _zeros(num_blocks, BLOCK_TOKENS * shape.row_width, dtype, device)) for shape in shapes
        ]
        self.copies = BlockCopies([layer.blocks for layer in self.layers])
        """Out of the cache and into it."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, (from, to) each, in every layer; all are read before any is written."""
        device = self.layers[0].blocks.device
        sources, destinations = torch.tensor(copies, dtype=torch.int64, device=device).unbind(-1)
        for layer in self.layers:
            layer.blocks.index_copy_(0, destinations, layer.blocks.index_select(0, sources))


def block_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return sum(shape.row_width for shape in shapes) * BLOCK_TOKENS * dtype.itemsize


def _zeros(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that, on a CPU, occupy memory only once written: a pool is sized for the worst case.

    They must be zeros, not whatever was there: masked positions are read, and a NaN survives a mask.
    """
    if device.type != "cpu":
        return torch.zeros(rows, columns, dtype=dtype, device=device)
    return large_pages.zeros(rows * columns * dtype.itemsize).view(dtype).view(rows, columns)
