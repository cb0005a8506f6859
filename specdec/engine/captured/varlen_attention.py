"""Attention of a captured step through `torch.nn.attention.varlen`: blocks are read where they lie.

One captured step then serves any context up to its table's length. Whether a device does this for pages of our size
and layout is not written down anywhere we could rely on (PyTorch's own kernel takes no block tables, FlashAttention 3
does where it is installed), so it is tried: `find_varlen_attention` runs both attentions on a small pool and compares.
Not for float32, nor for scores that are capped. Called by `engine.captured.steps`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from specdec.engine.base import SequenceSlice
from specdec.engine.captured.buckets import Bucket, ContextSteps
from specdec.engine.captured.static_attention import GatheredAttention, StaticAttention, step_batch
from specdec.engine.captured.static_inputs import StaticInputs, StepNumbers, input_size
from specdec.engine.model.attention import RowContext
from specdec.engine.model.batch import AttentionKind, StepBatch
from specdec.engine.model.kv_cache import KvCache, LayerShape
from specdec.engine.model.options import Capture, first_line
from specdec.types import BLOCK_TOKENS

_log = logging.getLogger(__name__)

# Small enough that every window of a real model is cut by it.
_PROBE_WINDOW = 21
_PROBE_BUCKET = Bucket(num_sequences=4, width=3, num_blocks=4)
_PROBE_BLOCKS = 12
# A context that ends within a block with rows to spare, one that opens a block, one that begins; the fourth is padding.
_PROBE_SLICES = (
    SequenceSlice((0, 0, 0), 50, (7, 2, 9, 4), 3),
    SequenceSlice((0,), 32, (3, 0, 5), 1),
    SequenceSlice((0, 0), 0, (8,), 2),
)
# Keys, queries and values have spread 1; a wrong mask is off by some tenths, bfloat16 by a hundredth.
_PROBE_TOLERANCE = 0.05


class VarlenAttention:
    """Attention over block tables."""

    name = "varlen"
    # The table is all that grows with the context.
    context_steps = ContextSteps(first_tokens=8192, growth=16, most_tokens=None)

    def __init__(self, cache: KvCache, layer_kinds: Sequence[AttentionKind]) -> None:
        """Raises ImportError where the installed torch has no such attention."""
        # Not in every torch that we run on.
        from torch.nn.attention.varlen import varlen_attn

        # It gives a pair only where `return_aux` is asked for.
        self._varlen_attn = cast(Callable[..., torch.Tensor], varlen_attn)
        self._cache = cache
        self._layer_kinds = tuple(layer_kinds)

    def lay_out(self, inputs: StaticInputs) -> tuple[StepBatch, RowContext]:
        columns, bucket = inputs.on_device, inputs.bucket
        batch = step_batch(inputs, ())
        first_rows = torch.arange(0, bucket.num_rows + 1, bucket.width, dtype=torch.int32, device=columns.slots.device)
        context = _VarlenContext(
            batch,
            self._cache,
            self._layer_kinds,
            self._varlen_attn,
            width=bucket.width,
            first_rows=first_rows,
            lengths=columns.lengths.to(torch.int32),
            tables=columns.tables.to(torch.int32),
        )
        return batch, context


@dataclass(frozen=True, slots=True)
class _VarlenContext:
    """One step's attention; see `engine.model.attention.RowContext`."""

    batch: StepBatch
    cache: KvCache
    layer_kinds: tuple[AttentionKind, ...]
    varlen_attn: Callable[..., torch.Tensor]
    width: int
    first_rows: torch.Tensor  # int32 [B + 1]
    lengths: torch.Tensor  # int32 [B]
    tables: torch.Tensor  # int32 [B, N]

    def attend_rows(
        self, layer_index: int, query: torch.Tensor, kv_rows: torch.Tensor, scale: float, softcap: float | None
    ) -> torch.Tensor:
        layer, window = self.cache.layers[layer_index], self.layer_kinds[layer_index].window
        if self.batch.opened_blocks is not None:
            layer.clear(self.batch.opened_blocks)
        layer.write(self.batch.slots, kv_rows)
        keys, values = layer.pages()
        return self.varlen_attn(
            query,  # [T, H, D]
            keys,
            values,
            self.first_rows,
            None,  # where keys begin, says the table
            self.width,
            self.tables.shape[1] * BLOCK_TOKENS,
            scale=scale,
            # How far to the left and to the right of itself a row sees, the last row being at the last key.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=True,
            seqused_k=self.lengths,
            block_table=self.tables,
        )


def find_varlen_attention(
    cache: KvCache, layer_kinds: Sequence[AttentionKind], capture: Capture
) -> StaticAttention | None:
    """Varlen attention for these layers, if it can be captured here and computes what the gathered one does."""
    pairs = dict.fromkeys(zip((layer.shape for layer in cache.layers), layer_kinds, strict=True))
    if any(kind.softcap is not None or shape.key_dim != shape.value_dim for shape, kind in pairs):
        return None
    if not _is_right(cache, pairs, capture):
        if not _activate_flash_3():
            return None
        if not _is_right(cache, pairs, capture):
            torch.nn.attention.restore_flash_attention_impl()
            return None
    return VarlenAttention(cache, layer_kinds)


def _activate_flash_3() -> bool:
    """Puts FlashAttention 3 in the place of PyTorch's own kernels, where it is installed beside it."""
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is None:
        return False
    try:
        activate("FA3")
    except Exception as error:  # not installed, or for another torch
        _log.debug("FlashAttention 3 cannot be activated: %s", first_line(error))
        return False
    return True


def _is_right(cache: KvCache, pairs: Iterable[tuple[LayerShape, AttentionKind]], capture: Capture) -> bool:
    pool = cache.layers[0].blocks
    try:
        with torch.inference_mode():
            difference = max(_probe(shape, kind, pool.dtype, pool.device, capture) for shape, kind in pairs)
    except Exception as error:  # what is missing may be a module, a kernel, an argument or a page size
        _log.debug("varlen attention does not run here: %s", first_line(error))
        return False
    if difference > _PROBE_TOLERANCE:
        _log.warning("varlen attention is off by %.2g here and is not used", difference)
        return False
    return True


def _probe(shape: LayerShape, kind: AttentionKind, dtype: torch.dtype, device: torch.device, capture: Capture) -> float:
    """The largest difference of both attentions on rows that are not padding."""
    if kind.window is not None:
        kind = replace(kind, window=min(kind.window, _PROBE_WINDOW))
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    num_heads = shape.num_kv_heads * kind.queries_per_kv_head
    query = random(_PROBE_BUCKET.num_rows, num_heads, shape.key_dim)
    kv_rows = random(_PROBE_BUCKET.num_rows, shape.row_width)
    pool = random(_PROBE_BLOCKS, BLOCK_TOKENS * shape.row_width)
    inputs = StaticInputs(_PROBE_BUCKET, StepNumbers(input_size(_PROBE_BUCKET), device), _PROBE_BLOCKS - 1)
    inputs.fill(_PROBE_SLICES)
    outputs = []
    for attention_class, record in ((GatheredAttention, None), (VarlenAttention, capture)):
        cache = KvCache([shape], num_blocks=_PROBE_BLOCKS, dtype=dtype, device=device)
        cache.layers[0].blocks.copy_(pool)
        output = torch.zeros_like(query)
        attention: StaticAttention = attention_class(cache, [kind])

        def step(attention: StaticAttention = attention, output: torch.Tensor = output) -> None:
            _, context = attention.lay_out(inputs)
            output.copy_(context.attend_rows(0, query, kv_rows, shape.key_dim**-0.5, None))

        (step if record is None else record(step))()
        outputs.append(output)
    gathered, varlen = outputs
    real_rows = [row for row, slot in enumerate(inputs.on_device.slots.view(-1).tolist())
                 if slot < (_PROBE_BLOCKS - 1) * BLOCK_TOKENS]  # fmt: skip
    difference = (gathered - varlen)[real_rows].abs().max()
    return float(difference.nan_to_num(nan=torch.inf))
