"""Paged attention with Triton kernels, which read KV blocks in place.

One launch takes ragged rows: draft steps of one row, verifications, chunks of prompts. The kernels
(`engine.cuda_graphs.paged_kernels`) read block tables and lengths on the device, so one graph serves every context.
`engine.cuda_graphs.attention_choice` tries them on a device before use. Called by `engine.cuda_graphs.graph_steps`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.cuda_graphs.buckets import ContextSteps
from specdec.engine.cuda_graphs.device_tables import DeviceTables
from specdec.engine.cuda_graphs.static_attention import step_batch
from specdec.engine.cuda_graphs.static_inputs import StaticInputs
from specdec.engine.model.attention import RowContext
from specdec.engine.model.batch import AttentionKind, StepBatch
from specdec.engine.model.kv_cache import KvCache, LayerKv

# Maximum number of rows of a matrix product. The few rows of a step would leave most of a larger tile empty. Tensor
# cores do not take float32, and Triton compiles large float32 products for minutes.
_MOST_TILE_ROWS = 64
_MOST_TILE_ROWS_FLOAT32 = 16
# A verification of up to this many rows reads each key once.
_TILE_QUERIES = 8
_FEWEST_TILE_ROWS = 16  # the smallest tile of tensor cores
# The kernels load the rows of this many sequences at once. A step of more sequences compiles another kernel.
_FEWEST_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """Division of a context among programs that run in parallel.

    It is fixed for a process, whatever a step holds: it and the row's position determine the order of a row's sums.
    """

    tile_keys: int = 64
    """Number of keys in one matrix product; a power of two, at least 16."""
    unit_tiles: int = 1
    """Number of consecutive tiles that one program takes."""
    num_splits: int = 16
    """Number of programs; a power of two. 16 for each of 8 KV heads occupy 132 multiprocessors with one sequence."""
    tile_outputs: int = 1
    """Number of output heads that one program merges; a power of two."""


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """The sequences that a step's T rows belong to."""

    first_rows: torch.Tensor  # int32 [B + 1], B >= 1: first row of each sequence, then T
    lengths: torch.Tensor  # int64 [B]: number of keys, including those of this step
    tables: torch.Tensor  # int64: block ids of all sequences, at least those of their keys
    table_firsts: torch.Tensor  # int64 [B]: index of each sequence's first block id


def paged_attention(
    query: torch.Tensor,
    layer: LayerKv,
    kind: AttentionKind,
    rows: RaggedRows,
    *,
    scale: float,
    softcap: float | None = None,
    splitting: ContextSplit | None = None,
) -> torch.Tensor:
    """Return the attention of ragged rows over one layer's cache, which already holds the step's own keys.

    A sequence's last row is at its last key, and each row sees the keys up to its own. The call does not wait for the
    device. No key and no table entry past a sequence's last row is read.

    Args:
        query: [T, H, key_dim], contiguous within a row; T >= 1.
        layer: the layer's cache.
        kind: the layer's attention kind; without sinks.
        rows: the rows' sequences.
        scale: factor of the scores.
        softcap: bound of the scores; None: unbounded.
        splitting: the process's splitting by default.

    Returns:
        [T, H, value_dim]; zeros for a row that sees no key.
    """
    # Imported late: the rest of the package must work without Triton.
    from triton import next_power_of_2
    from triton.runtime.interpreter import InterpretedFunction

    from specdec.engine.cuda_graphs.paged_kernels import attend_parts, merge_parts

    splitting = splitting or ContextSplit()
    num_rows, num_heads, _ = query.shape
    shape, group, num_sequences = layer.shape, kind.queries_per_kv_head, len(rows.lengths)
    if query.stride()[1:] != (shape.key_dim, 1):
        query = query.contiguous()
    tile_rows = _tile_rows(next_power_of_2, group, query.dtype)
    key_pad, value_pad = (max(16, next_power_of_2(dim)) for dim in (shape.key_dim, shape.value_dim))
    both = {
        "WINDOW": kind.window or 0,
        "VALUE_DIM": shape.value_dim,
        "VALUE_PAD": value_pad,
        "NUM_SPLITS": splitting.num_splits,
        "MOST_SEQUENCES": max(_FEWEST_SEQUENCES, next_power_of_2(num_sequences)),
    }
    parts = (num_rows, num_heads, splitting.num_splits)
    sums = torch.empty(*parts, shape.value_dim, dtype=torch.float32, device=query.device)
    maxima, weights = torch.empty(2, *parts, dtype=torch.float32, device=query.device)
    output = torch.empty(num_rows, num_heads, shape.value_dim, dtype=query.dtype, device=query.device)
    per_e = math.log2(math.e)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        attend_parts[(num_rows // (tile_rows // group) + num_sequences, shape.num_kv_heads, splitting.num_splits)](
            query, layer.rows, rows.tables, rows.table_firsts, rows.lengths, rows.first_rows, sums, maxima, weights,
            num_sequences, query.stride(0),
            scale * per_e if softcap is None else scale / softcap, 0.0 if softcap is None else softcap * per_e,
            IS_CAPPED=softcap is not None, NUM_KV_HEADS=shape.num_kv_heads, QUERIES_PER_KV_HEAD=group,
            KEY_DIM=shape.key_dim, KEY_PAD=key_pad, PAGE_TOKENS=BLOCK_TOKENS,
            TILE_ROWS=tile_rows, TILE_QUERIES=tile_rows // group,
            TILE_KEYS=splitting.tile_keys, UNIT_TILES=splitting.unit_tiles,
            WIDENS_OPERANDS=isinstance(attend_parts, InterpretedFunction),
            num_warps=num_warps(key_pad, value_pad),
            num_stages=3,  # pipelines the loads of block ids, of keys, and the products
            **both,
        )  # fmt: skip
        merge_parts[(-(-num_rows * num_heads // splitting.tile_outputs),)](
            sums, maxima, weights, rows.lengths, rows.first_rows, output, num_rows, num_sequences,
            NUM_HEADS=num_heads, UNIT_KEYS=splitting.tile_keys * splitting.unit_tiles,
            TILE_OUTPUTS=splitting.tile_outputs, **both,
        )  # fmt: skip
    return output


def num_warps(key_pad: int, value_pad: int) -> int:
    """Return the number of warps of a program. Heads of 256 numbers do not fit into the registers of four warps."""
    return 4 if max(key_pad, value_pad) <= 128 else 8


def _tile_rows(next_power_of_2: Callable[[int], int], group: int, dtype: torch.dtype) -> int:
    """Return the number of rows of a product. It is the same for all steps, so that a row always has the same bits."""
    most = _MOST_TILE_ROWS_FLOAT32 if dtype == torch.float32 else _MOST_TILE_ROWS
    return max(_FEWEST_TILE_ROWS, min(next_power_of_2(_TILE_QUERIES * group), most), next_power_of_2(group))


class PagedAttention:
    """Attention of CUDA graphs through `paged_attention`."""

    name = "paged"
    context_steps: ContextSteps | None = None

    def __init__(
        self, cache: KvCache, layer_kinds: Sequence[AttentionKind], max_context_tokens: int | None = None
    ) -> None:
        """`max_context_tokens`: maximum context of one sequence; None: the size of the cache."""
        most_blocks = cache.num_blocks
        if max_context_tokens is not None:
            most_blocks = min(most_blocks, -(-max_context_tokens // BLOCK_TOKENS))
        self.tables = DeviceTables(most_blocks, cache.num_blocks - 1, cache.layers[0].blocks.device)
        self._cache = cache
        self._layer_kinds = tuple(layer_kinds)

    def lay_out(self, inputs: StaticInputs) -> tuple[StepBatch, RowContext]:
        columns, bucket, tables = inputs.on_device, inputs.bucket, self.tables
        tables.apply(columns.changed_at, columns.changed_to)
        batch = step_batch(inputs, ())
        device = columns.slots.device
        rows = RaggedRows(
            first_rows=torch.arange(0, bucket.num_rows + 1, bucket.width, dtype=torch.int32, device=device),
            lengths=columns.lengths,
            tables=tables.on_device,
            table_firsts=columns.table_firsts,
        )
        return batch, _KernelContext(batch, self._cache, self._layer_kinds, rows)


@dataclass(frozen=True, slots=True)
class _KernelContext:
    """One step's attention; see `engine.model.attention.RowContext`."""

    batch: StepBatch
    cache: KvCache
    layer_kinds: tuple[AttentionKind, ...]
    rows: RaggedRows

    def attend_rows(
        self, layer_index: int, query: torch.Tensor, kv_rows: torch.Tensor, scale: float, softcap: float | None
    ) -> torch.Tensor:
        layer = self.cache.layers[layer_index]
        if self.batch.opened_blocks is not None:
            layer.clear(self.batch.opened_blocks)  # eager attention also reads masked slots
        layer.write(self.batch.slots, kv_rows)
        return self.attend(layer_index, query, scale, softcap)

    def attend(self, layer_index: int, query: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
        """See `engine.cuda_graphs.fused_stack.StoredContext`. These kernels do not need cleared blocks."""
        layer, kind = self.cache.layers[layer_index], self.layer_kinds[layer_index]
        return paged_attention(query, layer, kind, self.rows, scale=scale, softcap=softcap)
