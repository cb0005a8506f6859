"""One sequence's step of a Llama-shaped model as a pure function of tensors, for compilers.

Nothing is written: keys and values come back beside the logits, and the caller stores them, so that a compiler has no
mutation to get right and a padding row leaves no trace. Not for prefill chunks of whole prompts (there is always
something cached to read) and not for several sequences. Called by `engine.compiled.steps`, which says what is compiled
how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention
from transformers import PreTrainedModel

from specdec.engine.model.batch import AttentionKind
from specdec.engine.model.int8_projection import Int8Projection
from specdec.engine.model.llama_shape import LlamaLayer, has_qk_norm
from specdec.types import BLOCK_TOKENS

#: What a layer's linear layers become.
_MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], nn.Module]


class StepGraph(nn.Module):
    """The weights of a model that `LlamaStack.fits`, fused but in the layout of the checkpoint."""

    _frequencies: torch.Tensor
    _embedding: torch.Tensor

    def __init__(self, model: PreTrainedModel, layer_kinds: Sequence[AttentionKind], *, is_int8: bool) -> None:
        """Copies what it fuses and shares the rest with `model`, which stays as it is.

        Args:
            model: loaded, in its dtype and on its device.
            layer_kinds: one a layer; `forward` takes block ids for each kind in the order of first appearance.
            is_int8: round the weights of the layers' products, as `Int8Projection` does.
        """
        super().__init__()
        inner, make = model.model, Int8Projection if is_int8 else _Product
        kinds = tuple(dict.fromkeys(layer_kinds))
        self.num_kinds = len(kinds)
        self._masks = [_Mask(kind) for kind in kinds]
        self._kind_of_layer = [kinds.index(kind) for kind in layer_kinds]
        self._rotary_scaling = float(inner.rotary_emb.attention_scaling)
        self.register_buffer("_frequencies", inner.rotary_emb.inv_freq.detach().float())
        self.register_buffer("_embedding", inner.embed_tokens.weight.detach())
        self._layers = nn.ModuleList(_Layer(layer, make) for layer in inner.layers)
        self._norm = _RmsNorm(inner.norm.weight, inner.norm.variance_epsilon)
        self._head = _Product(model.lm_head.weight, model.lm_head.bias)

    def forward(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        block_ids: list[torch.Tensor],
        pools: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs Q consecutive tokens of one sequence.

        Args:
            token_ids: int64 [Q].
            position_ids: int64 [Q], ascending by one; the last may be repeated for padding rows.
            block_ids: one int64 [n] per attention kind: the sequence's last n blocks, those of this step's tokens
                included. A block in front of the sequence's first counts as position below 0 and is not looked at.
            pools: one [num_blocks, BLOCK_TOKENS * row_width] per layer.

        Returns:
            Logits [Q, V], and what is to be stored: keys and values of all layers [layers, Q, row_width].
        """
        hidden = embedding(token_ids, self._embedding)  # [Q, hidden]
        angles = position_ids[:, None].float() * self._frequencies  # [Q, head_dim / 2]
        cos, sin = angles.cos() * self._rotary_scaling, angles.sin() * self._rotary_scaling
        cos = torch.cat((cos, cos), dim=-1).to(hidden.dtype)[:, None]  # [Q, 1, head_dim]
        signed_sin = torch.cat((-sin, sin), dim=-1).to(hidden.dtype)[:, None]
        masks = [
            mask(position_ids, ids.shape[0], hidden.dtype) for mask, ids in zip(self._masks, block_ids, strict=True)
        ]
        stored = []
        for layer, kind, pool in zip(self._layers, self._kind_of_layer, pools, strict=True):
            hidden, kv_rows = layer(hidden, cos, signed_sin, pool, block_ids[kind], masks[kind])
            stored.append(kv_rows)
        return self._head(self._norm(hidden)), torch.stack(stored)


class _Mask:
    """Who sees whom under one attention kind; see `StepGraph.forward`."""

    def __init__(self, kind: AttentionKind) -> None:
        self._window = kind.window
        self._queries_per_kv_head = kind.queries_per_kv_head

    def __call__(self, positions: torch.Tensor, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
        """positions [Q] -> additive [Q * queries_per_kv_head, num_blocks * BLOCK_TOKENS + Q]."""
        first = (positions[-1] // BLOCK_TOKENS - (num_blocks - 1)) * BLOCK_TOKENS
        cached = first + torch.arange(num_blocks * BLOCK_TOKENS, device=positions.device)
        # Own rows are seen by their order: a padding row has the position of a real one.
        rows = torch.arange(positions.shape[0], device=positions.device)
        query_rows = rows.repeat_interleave(self._queries_per_kv_head)
        is_cached = ((cached >= 0) & (cached < positions[0])).expand(len(query_rows), -1)
        visible = torch.cat((is_cached, rows <= query_rows[:, None]), dim=1)
        if self._window is not None:
            query_positions = positions.repeat_interleave(self._queries_per_kv_head)
            visible = visible & (torch.cat((cached, positions)) > query_positions[:, None] - self._window)
        return torch.where(visible, 0.0, float("-inf")).to(dtype)


class _Product(nn.Module):
    """x [..., in] -> x W^T + b [..., out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach())
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class _RmsNorm(nn.Module):
    """Root mean square normalisation over the last dimension, in float32."""

    _gains: torch.Tensor

    def __init__(self, gains: torch.Tensor, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.register_buffer("_gains", gains.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self._eps)).to(x.dtype) * self._gains


class _Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, layer: LlamaLayer, make: _MakeProduct) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._head_dim = attention.head_dim
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._num_kv_heads = attention.k_proj.out_features // self._head_dim
        self._scaling = attention.scaling
        self._attention_norm = _RmsNorm(layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon)
        self._mlp_norm = _RmsNorm(
            layer.post_attention_layernorm.weight, layer.post_attention_layernorm.variance_epsilon
        )
        self._qkv = _fused((attention.q_proj, attention.k_proj, attention.v_proj), make)
        self._output = make(attention.o_proj.weight, attention.o_proj.bias)
        self._gate_up = _fused((mlp.gate_proj, mlp.up_proj), make)
        self._down = make(mlp.down_proj.weight, mlp.down_proj.bias)
        self._activation = mlp.act_fn
        self._qk_norm = None
        if has_qk_norm(attention):
            q, k = attention.q_norm.weight, attention.k_norm.weight
            gains = torch.cat((q.expand(self._num_heads, -1), k.expand(self._num_kv_heads, -1)))
            self._qk_norm = _RmsNorm(gains, attention.q_norm.variance_epsilon)

    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, dim = hidden.shape[0], self._head_dim
        qkv = self._qkv(self._attention_norm(hidden))
        qk = qkv[:, : (self._num_heads + self._num_kv_heads) * dim].view(rows, -1, dim)
        normed = qk if self._qk_norm is None else self._qk_norm(qk)
        rotated = normed * cos + normed.roll(dim // 2, -1) * signed_sin
        values = qkv[:, (self._num_heads + self._num_kv_heads) * dim :]
        kv_rows = torch.cat((rotated[:, self._num_heads :].reshape(rows, -1), values), dim=1)  # [Q, row_width]
        attended = self._attend(rotated[:, : self._num_heads], kv_rows, pool, block_ids, mask)
        hidden = hidden + self._output(attended)
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self._down(self._activation(gate) * up), kv_rows

    def _attend(
        self,
        query: torch.Tensor,
        kv_rows: torch.Tensor,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """query [Q, H, head_dim] -> [Q, H * head_dim]."""
        rows, dim, kv_heads = query.shape[0], self._head_dim, self._num_kv_heads
        cached = pool.index_select(0, block_ids).view(-1, kv_rows.shape[1])  # [n * BLOCK_TOKENS, row_width]
        both = torch.cat((cached, kv_rows)).view(-1, 2, kv_heads, dim).permute(1, 2, 0, 3)  # [2, KV, L, head_dim]
        # Heads that share keys become rows of one matrix: no copy of keys and values per head.
        packed = query.reshape(rows, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
        output = scaled_dot_product_attention(packed, both[:1], both[1:], attn_mask=mask, scale=self._scaling)
        return output.view(kv_heads, rows, -1, dim).transpose(0, 1).reshape(rows, -1)


def _fused(linears: Sequence[nn.Linear], make: _MakeProduct) -> nn.Module:
    """One product whose outputs are those of several that share their input, side by side."""
    biases: list[torch.Tensor] = [layer.bias for layer in linears]
    bias = None if any(bias is None for bias in biases) else torch.cat(biases)
    return make(torch.cat([layer.weight for layer in linears]), bias)
