"""Attention over the paged cache, in place of transformers' own.

It is registered with transformers under `ATTENTION_NAME`. A model whose configuration has that name calls
`paged_attention_forward` in every layer, within `attending` to the step's `PagedContext`; a context variable passes it,
because some models pass no keyword arguments to their layers. Keys and values are stored in `kv_cache` and read from
it; the output goes on through the model, whose logits `model_runner` takes. Called by transformers' modules and by
`engine.model.llama_stack`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from specdec.engine.model.batch import AttentionGroup, KvView, StepBatch
from specdec.engine.model.kv_cache import KvCache, LayerKv

ATTENTION_NAME = "specdec_paged"


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention contract: query [1, H, T, D], key, value [1, KV, T, D] -> [1, T, H, D]."""
    context = _context.get()
    if context is None:
        raise RuntimeError(f"{ATTENTION_NAME} attention was called outside a worker's step")
    output = context.attend_layer(
        next(context.calls),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap,
        s_aux,
    )
    return output.unsqueeze(0).contiguous(), None  # callers reshape it by views


class LayerContext(Protocol):
    """Attention of one step, as transformers' modules call it."""

    @property
    def calls(self) -> Iterator[int]:
        """Layer index of each further call."""
        ...

    def attend_layer(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `PagedContext.attend_layer`."""
        ...


_context: ContextVar[LayerContext | None] = ContextVar("paged_context", default=None)


@contextmanager
def attending(context: LayerContext) -> Iterator[None]:
    """Make transformers' modules attend in `context` within a `with` block, one call after the other."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


class RowContext(Protocol):
    """Attention of one step for forward passes whose keys and values have the cache's row layout."""

    def attend_rows(
        self, layer_index: int, query: torch.Tensor, kv_rows: torch.Tensor, scale: float, softcap: float | None
    ) -> torch.Tensor:
        """Store kv_rows [T, row_width] and attend; the other arguments are those of `PagedContext.attend_layer`."""
        ...


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Attention of one step: it stores the step's keys and values, then attends group by group."""

    batch: StepBatch
    cache: KvCache
    kind_of_layer: tuple[int, ...]
    """Index into each group's `views`, for each layer."""
    calls: Iterator[int] = field(default_factory=count)
    """Cache layer of each further call. Transformers' modules call in the order of the probe; a module that attends
    twice, or a layer that runs twice, has one cache layer for each call."""

    def attend_layer(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the attention of one layer for the step's T tokens, in the order of the flat batch.

        Args:
            layer_index: index of the cache layer.
            query: [T, H, key_dim], positions already encoded.
            key: [T, num_kv_heads, key_dim], positions already encoded.
            value: [T, num_kv_heads, value_dim].
            scale: factor of the scores.
            softcap: bounds the scores to (-softcap, softcap) by tanh; None leaves them unbounded.
            sinks: [H], score of an attention sink per head; None if the heads have no sinks.

        Returns:
            [T, H, value_dim].
        """
        kv_rows = torch.cat((key.flatten(1), value.flatten(1)), dim=1)
        return self.attend_rows(layer_index, query, kv_rows, scale, softcap, sinks)

    def attend_rows(
        self,
        layer_index: int,
        query: torch.Tensor,
        kv_rows: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store rows and attend; see `RowContext.attend_rows`."""
        layer, kind = self.cache.layers[layer_index], self.kind_of_layer[layer_index]
        if self.batch.opened_blocks is not None:
            layer.clear(self.batch.opened_blocks)
        layer.write(self.batch.slots, kv_rows)
        outputs = []
        for group in self.batch.groups:
            rows = slice(group.first_row, group.first_row + group.num_rows)
            view = group.views[kind]
            if view is None:
                outputs.append(_attend_causally(layer, query[rows], kv_rows[rows], scale))
            else:
                outputs.append(_attend_group(group, view, layer, query[rows], scale, softcap, sinks))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_causally(layer: LayerKv, query: torch.Tensor, kv_rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend over a sequence from its first token on, whose keys are all in this step."""
    # The rows may have a larger stride than the cache's, as slices of a fused projection have.
    keys, values = layer.split(kv_rows.contiguous(), 1, kv_rows.shape[0])
    output = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),  # [1, H, Q, D]
        keys,
        values,
        is_causal=True,
        scale=scale,
        enable_gqa=query.shape[1] != layer.shape.num_kv_heads,
    )
    return output[0].transpose(0, 1)


def _attend_group(
    group: AttentionGroup,
    view: KvView,
    layer: LayerKv,
    query: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend over one group: query [num_rows, H, key_dim] -> [num_rows, H, value_dim]."""
    if view.block_ids is None:
        keys, values = layer.view_run(view.run_start, view.length)  # [B, KV, L, D]
    else:
        keys, values = layer.read_blocks(view.block_ids, group.batch, view.length)
    B, Q, KV = group.batch, group.num_queries, layer.shape.num_kv_heads
    H, D = query.shape[1:]
    if group.pad_index is not None:
        query = query.index_select(0, group.pad_index)
    # Heads that share keys become rows of one matrix: no copy of keys and values per head.
    if Q == 1:
        packed = query.reshape(B, KV, H // KV, D)
    else:
        packed = query.reshape(B, Q, KV, H // KV, D).permute(0, 2, 1, 3, 4).reshape(B, KV, -1, D)  # [B, KV, Q * G, D]
    if softcap is None and sinks is None:
        output = scaled_dot_product_attention(packed, keys, values, attn_mask=view.mask, scale=scale)
    else:
        if sinks is not None:
            sinks = sinks.view(KV, 1, H // KV).expand(KV, Q, H // KV).reshape(KV, -1, 1)  # [KV, Q * G, 1]
        output = _attend_with_extras(packed, keys, values, view.mask, scale, softcap, sinks)
    if Q > 1:
        output = output.view(B, KV, Q, H // KV, -1).permute(0, 2, 1, 3, 4)
    output = output.reshape(B * Q, H, -1)
    return output if group.unpad_index is None else output.index_select(0, group.unpad_index)


def _attend_with_extras(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with softcap or sinks, which PyTorch's attention lacks: query [B, KV, Q * G, key_dim] -> value_dim."""
    scores = query @ keys.transpose(-1, -2)
    scores = scores.mul_(scale) if softcap is None else scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(len(scores), -1, -1, -1).to(scores.dtype)), dim=-1)
    shares = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    return shares[..., : keys.shape[2]] @ values


def no_mask(*_: Any, **__: Any) -> None:
    """Stop transformers from building a mask: `engine.model.batch` builds the step's masks."""


def register_attention() -> None:
    """Register `ATTENTION_NAME` with transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, no_mask)
