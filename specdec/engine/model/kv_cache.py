"""Paged KV cache: one pool of blocks per layer and its size, how a step accesses it, and copies of whole blocks.

`engine.sessions.block_manager` decides which sequence owns which block; block ids are only addresses here. What a layer
reads goes back to `engine.model.attention`. Built by `engine.load_pipeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.contract.errors import InvalidRequest
from specdec.contract.types import BLOCK_TOKENS, SLOTS_PER_SESSION
from specdec.engine import large_pages
from specdec.engine.model.state_pools import StatePools

# By default a CPU pool holds this many sessions of this many tokens, within this many bytes.
_CPU_SESSIONS = 64
_CPU_SESSION_TOKENS = 2048
_CPU_POOL_BYTES = 1 << 30

#: Slots for recurrent states in the pool of a hybrid, per session that it is sized for: those of a running session, and
#: one snapshot.
SLOTS_OF_POOL = SLOTS_PER_SESSION + 1
# A pool of few blocks has slots for this many sessions.
_FEWEST_SESSIONS = 8


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of what one layer caches per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def row_width(self) -> int:
        """Numbers per token: keys of all heads, then values of all heads."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class LayerKv:
    """One layer's pool.

    `blocks` is [num_blocks, BLOCK_TOKENS * row_width]. A token's row holds its keys of all heads, then its values, so
    that one copy moves both. Positions [16 * i, 16 * i + 16) of a sequence are in the block `block_table[i]`.
    """

    def __init__(self, shape: LayerShape, blocks: torch.Tensor) -> None:
        self.shape = shape
        self.blocks = blocks
        self.rows = blocks.view(-1, shape.row_width)  # [num_blocks * BLOCK_TOKENS, row_width]

    def clear(self, block_ids: torch.Tensor) -> None:
        """Zero whole blocks [n]. Masked positions are read too, and a former owner's NaN would survive the mask."""
        self.blocks.index_fill_(0, block_ids, 0)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store the rows [T, row_width] of T tokens at `slots` (block id * BLOCK_TOKENS + offset)."""
        self.rows.index_copy_(0, slots, rows)

    def read_blocks(self, block_ids: torch.Tensor, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the blocks `block_ids` [batch * n], n * BLOCK_TOKENS = length, in the form of `split`."""
        return self.split(self.blocks.index_select(0, block_ids), batch, length)

    def view_run(self, first_slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views, not copies, of `length` tokens of one sequence whose blocks are adjacent; see `split`."""
        return self.split(self.rows, 1, length, first_slot)

    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the whole pool as keys and values, each [num_blocks, BLOCK_TOKENS, num_kv_heads, dim]."""
        pages = self.rows.view(-1, BLOCK_TOKENS, self.shape.row_width)
        keys, values = pages.split(
            (self.shape.num_kv_heads * self.shape.key_dim, self.shape.num_kv_heads * self.shape.value_dim), dim=-1
        )
        heads = self.shape.num_kv_heads
        return keys.unflatten(-1, (heads, self.shape.key_dim)), values.unflatten(-1, (heads, self.shape.value_dim))

    def split(
        self, rows: torch.Tensor, batch: int, length: int, first_row: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of contiguous rows as keys and values, each [batch, num_kv_heads, length, dim]."""
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
        self,
        shapes: Sequence[LayerShape],
        *,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StatePools | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.states = states
        """States of the recurrent layers of a hybrid; None for other models."""
        self.layers = [
            LayerKv(shape, _zeros(num_blocks, BLOCK_TOKENS * shape.row_width, dtype, device)) for shape in shapes
        ]
        self.copies = BlockCopies([layer.blocks for layer in self.layers])
        """Copies between the cache and host memory."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to) in every layer; all sources are read before any destination is written."""
        device = self.layers[0].blocks.device
        sources, destinations = torch.tensor(copies, dtype=torch.int64, device=device).unbind(-1)
        for layer in self.layers:
            layer.blocks.index_copy_(0, destinations, layer.blocks.index_select(0, sources))


class BlockCopies:
    """Copies of whole blocks between pools [num_blocks, numbers of a block], one a layer, and host memory.

    A block's bytes are its layers' one after the other, each as it is in the pool. On a CPU NumPy copies them: in a
    thread of its own, torch would start helper threads that stay and slow down every step. On an accelerator blocks are
    read on a separate stream, beside the steps, and written in order with them.
    """

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        self._device = pools[0].device
        self._pools = [pool.view(torch.uint8) for pool in pools]
        self.layer_bytes = tuple(pool.shape[1] for pool in self._pools)
        """Bytes of one block in each layer."""
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def read(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """Return the blocks' bytes; see `engine.base.Worker.read_blocks`."""
        if self._stream is not None:
            return self._read_beside(self._stream, block_ids)
        rows = np.empty((len(block_ids), sum(self.layer_bytes)), dtype=np.uint8)
        for pool, columns in self._columns():
            rows[:, columns] = pool.numpy()[block_ids]
        return rows

    def write(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Store the blocks' bytes; see `engine.base.Worker.write_blocks`."""
        if self._stream is None:
            for pool, columns in self._columns():
                pool.numpy()[block_ids] = rows[:, columns]
            return
        index = torch.tensor(block_ids, device=self._device)
        copied = torch.tensor(rows).to(self._device)  # torch cannot share memory that is read-only
        for pool, columns in self._columns():
            pool.index_copy_(0, index, copied[:, columns])
        # Reads run on another stream, which does not wait for this one.
        torch.cuda.current_stream(self._device).synchronize()

    def _read_beside(self, stream: torch.cuda.Stream, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        with torch.inference_mode(), torch.cuda.stream(stream):
            index = torch.tensor(block_ids, device=self._device)
            rows: NDArray[np.uint8] = torch.cat([pool.index_select(0, index) for pool in self._pools], 1).cpu().numpy()
        return rows

    def _columns(self) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield each pool with the slice of its bytes in a row of all layers."""
        end = 0
        for pool, num_bytes in zip(self._pools, self.layer_bytes, strict=True):
            end += num_bytes
            yield pool, slice(end - num_bytes, end)


def block_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers."""
    return sum(shape.row_width for shape in shapes) * BLOCK_TOKENS * dtype.itemsize


def pool_sizes(
    bytes_per_block: int, slot_bytes: int, context: int, kv_cache_bytes: int | None, num_kv_blocks: int | None
) -> tuple[int, int]:
    """Return the blocks of the KV pool, and the slots for recurrent states: the requested blocks or bytes, or else the
    default of a CPU.

    Args:
        bytes_per_block: bytes of a block over all layers.
        slot_bytes: bytes of one sequence's recurrent states; 0 for a model without any, which has no slots.
        context: longest sequence.
        kv_cache_bytes: bytes of both together, if they are requested.
        num_kv_blocks: number of blocks, if it is requested; the slots are beside it.

    Raises:
        InvalidRequest: there is no room for one block, or for the states of one session.
    """
    session_blocks = -(-min(context, _CPU_SESSION_TOKENS) // BLOCK_TOKENS)
    states_bytes = SLOTS_OF_POOL * slot_bytes
    if num_kv_blocks is not None:
        num_sessions = min(_CPU_SESSIONS, max(num_kv_blocks // session_blocks, _FEWEST_SESSIONS))
        blocks = num_kv_blocks
    else:
        one = session_blocks * bytes_per_block + states_bytes
        # If a wide model's context does not fit into the default, the pool holds one session nevertheless.
        wanted = max(min(_CPU_SESSIONS * one, _CPU_POOL_BYTES), one) if kv_cache_bytes is None else kv_cache_bytes
        num_sessions = max(1, wanted // one)
        blocks = (wanted - num_sessions * states_bytes) // bytes_per_block
    if blocks < 1:
        beside = f" beside {states_bytes} bytes of recurrent states" if slot_bytes else ""
        raise InvalidRequest(
            f"the KV pool has no room for one block of {bytes_per_block} bytes{beside}", field="kv_cache_bytes"
        )
    return blocks, num_sessions * SLOTS_OF_POOL if slot_bytes else 0


def _zeros(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros that, on a CPU, occupy memory only once written: a pool is sized for the worst case.

    The memory must hold zeros: masked positions are read, and a NaN survives a mask.
    """
    if device.type != "cpu":
        return torch.zeros(rows, columns, dtype=dtype, device=device)
    return large_pages.zeros(rows * columns * dtype.itemsize).view(dtype).view(rows, columns)
