"""Attention of a recorded step, laid out on the device from the step's inputs.

`GatheredAttention` copies the blocks of a bucket's contexts together and masks the keys that a row does not see. This
is the eager attention and works on any device, at the cost of the longest context that the bucket holds.
`engine.cuda_graphs.paged_attention` reads the blocks in place and needs Triton. Called by
`engine.cuda_graphs.graph_steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.cuda_graphs.buckets import ContextSteps
from specdec.engine.cuda_graphs.device_tables import DeviceTables
from specdec.engine.cuda_graphs.static_inputs import StaticInputs
from specdec.engine.model.attention import PagedContext, RowContext
from specdec.engine.model.batch import AttentionGroup, AttentionKind, KvView, StepBatch
from specdec.engine.model.kv_cache import KvCache


class StaticAttention(Protocol):
    """Attention of the rows of recorded steps."""

    name: str
    context_steps: ContextSteps | None
    """Context sizes that are recorded separately; None: one graph serves every context."""

    @property
    def tables(self) -> DeviceTables | None:
        """Block tables that stay on the device; None: each step transfers its own, as a rectangle."""

    def lay_out(self, inputs: StaticInputs) -> tuple[StepBatch, RowContext]:
        """Return the inputs of a step's forward pass. This is part of the recorded step and runs in each replay."""
        ...


class GatheredAttention:
    """Attention over copies of whole contexts."""

    name = "gathered"
    # Copying a context that is four times too long takes a few percent of a large model's step of one sequence. For
    # many sequences it would take most of the step, and the copies need memory, so their total is limited.
    context_steps: ContextSteps | None = ContextSteps(first_tokens=512, growth=4, most_tokens=1 << 17)
    tables = None

    def __init__(self, cache: KvCache, layer_kinds: Sequence[AttentionKind]) -> None:
        self._cache = cache
        self._kinds = tuple(dict.fromkeys(layer_kinds))
        self._kind_of_layer = tuple(self._kinds.index(kind) for kind in layer_kinds)

    def lay_out(self, inputs: StaticInputs) -> tuple[StepBatch, RowContext]:
        bucket = inputs.bucket
        group = AttentionGroup(
            first_row=0,
            num_rows=bucket.num_rows,
            batch=bucket.num_sequences,
            num_queries=bucket.width,
            pad_index=None,
            unpad_index=None,
            views=tuple(self._view(kind, inputs) for kind in self._kinds),
        )
        batch = step_batch(inputs, (group,))
        return batch, PagedContext(batch, self._cache, self._kind_of_layer)

    def _view(self, kind: AttentionKind, inputs: StaticInputs) -> KvView:
        """Return the blocks that the sequences see under one attention kind, and the mask of their keys."""
        positions = inputs.on_device.positions
        B, N = inputs.bucket.num_sequences, inputs.bucket.num_blocks
        tables = inputs.on_device.tables[: B * N].view(B, N)
        num_blocks = tables.shape[1]
        first_blocks = torch.zeros_like(positions[:, :1])  # [B, 1]
        if kind.window is not None:
            # The number of blocks that the rows' windows can touch, wherever they begin.
            num_blocks = min(num_blocks, (kind.window + inputs.bucket.width - 3) // BLOCK_TOKENS + 2)
            first_blocks = (positions[:, :1] - (kind.window - 1)).clamp_(min=0) // BLOCK_TOKENS
        columns = first_blocks + torch.arange(num_blocks, device=tables.device)  # [B, n]
        # Columns past the end of a table read its last block; the mask hides their positions.
        block_ids = tables.gather(1, columns.clamp(max=tables.shape[1] - 1))
        length = num_blocks * BLOCK_TOKENS
        keys = first_blocks * BLOCK_TOKENS + torch.arange(length, device=tables.device)  # [B, L]
        visible = keys[:, None, :] <= positions[:, :, None]  # [B, W, L]
        if kind.window is not None:
            visible &= keys[:, None, :] > positions[:, :, None] - kind.window
        dtype = self._cache.layers[0].blocks.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=tables.device).masked_fill_(~visible, float("-inf"))
        mask = mask.repeat_interleave(kind.queries_per_kv_head, dim=1).unsqueeze(1)
        return KvView(block_ids=block_ids.flatten(), run_start=0, length=length, mask=mask)


def step_batch(inputs: StaticInputs, groups: tuple[AttentionGroup, ...]) -> StepBatch:
    """Return the batch of a step, as views of its static inputs."""
    columns = inputs.on_device
    return StepBatch(
        token_ids=columns.token_ids.view(1, -1),
        position_ids=columns.positions.view(1, -1),
        slots=columns.slots.view(-1),
        # A sequence that opens no block has the scratch block here.
        opened_blocks=columns.opened_blocks,
        logit_rows=columns.logit_rows.view(-1),
        groups=groups,
    )
