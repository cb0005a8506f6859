"""Forward pass of Llama-shaped models: the same arithmetic as transformers' modules in fewer operations.

A step of a small model is bound by the number of operations, not by their size. So queries, keys and values come from
one projection, gate and up from another, residuals are added by the matrix product, and keys and values have the
cache's row layout. The weights are taken from a loaded model; one that does not have exactly the expected shape stays
with `TransformersForward`. Built by `engine.loader` and `engine.parallel.sharded_llama`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import embedding, rms_norm
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from specdec.engine.cuda_device import release_freed
from specdec.engine.linear.projection import ProjectionKinds, fuse_linears
from specdec.engine.linear.protocol import ProjectionMaker
from specdec.engine.model.attention import RowContext
from specdec.engine.model.batch import StepBatch
from specdec.engine.model.early_exit import EarlyExit
from specdec.engine.model.llama_shape import LlamaLayer, LlamaNorm, has_qk_norm

LLAMA_CLASSES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")


#: Logits [R, rows of the model's head], and the outputs [T, hidden] of some layers.
StepPass = Callable[[StepBatch, RowContext], tuple[torch.Tensor, list[torch.Tensor]]]


class RowForward(Protocol):
    """Forward pass whose keys and values have the cache's row layout."""

    def __call__(self, batch: StepBatch, context: RowContext) -> torch.Tensor:
        """Return the logits [R, rows of the model's head] of `batch.logit_rows`."""
        ...


class RowPass(RowForward, Protocol):
    """Forward pass of a whole model with its layers' outputs and early exits."""

    def with_outputs(
        self, batch: StepBatch, context: RowContext, layers: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return logits and layer outputs; see `engine.model.model_runner.TappedPass`."""
        ...

    def early_exit(self, early_exit: EarlyExit) -> RowForward:
        """Return the forward pass of draft steps of an early exit."""
        ...


class LlamaStack:
    """`engine.model.model_runner.ForwardPass` of a Llama, Mistral, Qwen 2 or Qwen 3 model."""

    def __init__(self, model: PreTrainedModel, kinds: ProjectionKinds) -> None:
        """Take the weights out of a model that `fits`, layer by layer; the model cannot run afterwards."""
        inner = model.model
        weight = inner.embed_tokens.weight.detach()
        self.embed: Callable[[torch.Tensor], torch.Tensor] = partial(embedding, weight=weight)
        self.rotary = inner.rotary_emb
        self.norm = StackNorm(inner.norm)
        self.hidden_size = int(weight.shape[1])
        self.layers = []
        for index in range(len(inner.layers)):
            self.layers.append(StackLayer(inner.layers[index], index, kinds.inner))
            inner.layers[index] = nn.Identity()
            # The KV pool has been sized already, so memory that stays cached after each layer would be missing.
            release_freed(model.device)
        self.head = kinds.head(model.lm_head.weight, model.lm_head.bias)

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Return whether a model has exactly the shape, to the last parameter, that this stack computes."""
        if type(model) not in LLAMA_CLASSES:
            return False
        allowed = {f"{name}.weight" for name in (*_LINEARS, *_NORMS)} | {f"{name}.bias" for name in _LINEARS}
        for layer in model.model.layers:
            names = {".".join(name.split(".")[-2:]) for name, _ in layer.named_parameters()}
            biased = {name for name in ("q_proj", "k_proj", "v_proj") if f"{name}.bias" in names}
            if names - allowed or len(biased) not in (0, 3):
                return False
        return bool(model.model.rotary_emb.inv_freq.numel() * 2 == model.model.layers[0].self_attn.head_dim)

    def __call__(self, batch: StepBatch, context: RowContext) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self._run(batch, context, len(self.layers))))
        return logits

    def with_outputs(
        self, batch: StepBatch, context: RowContext, layers: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return logits and layer outputs; see `engine.model.model_runner.TappedPass`."""
        outputs: dict[int, torch.Tensor] = dict.fromkeys(layers, torch.empty(0))
        logits: torch.Tensor = self.head(self.norm(self._run(batch, context, len(self.layers), outputs)))
        return logits, list(outputs.values())

    def early_exit(self, early_exit: EarlyExit) -> RowForward:
        """Return the forward pass of an early exit; see `RowPass.early_exit`."""
        adapter = early_exit.adapter or (lambda normed: normed)

        def forward(batch: StepBatch, context: RowContext) -> torch.Tensor:
            logits: torch.Tensor = self.head(adapter(self.norm(self._run(batch, context, early_exit.num_layers))))
            return logits

        return forward

    def _run(
        self,
        batch: StepBatch,
        context: RowContext,
        num_layers: int,
        outputs: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [R, hidden] of the logit rows after the first layers.

        The values of `outputs` are replaced by the outputs [T, hidden] of the layers that are its keys.
        """
        hidden = self.embed(batch.token_ids[0])  # [T, hidden]
        cos, signed_sin = self._rotation(hidden, batch)
        for index, layer in enumerate(self.layers[:num_layers]):
            hidden = layer(hidden, cos, signed_sin, context)
            if outputs is not None and index in outputs:
                outputs[index] = hidden
        return hidden.index_select(0, batch.logit_rows)  # [R, hidden]

    def run_layer(self, index: int, hidden: torch.Tensor, batch: StepBatch, context: RowContext) -> torch.Tensor:
        """Return the output [T, hidden] of one layer for its input [T, hidden]."""
        return self.layers[index](hidden, *self._rotation(hidden, batch), context)

    def _rotation(self, hidden: torch.Tensor, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines, [T, 1, head_dim] each."""
        cos, sin = self.rotary(hidden, batch.position_ids)  # [1, T, head_dim]
        half = sin.shape[-1] // 2
        # rotate_half(x) = (-x2, x1): the sign is applied to the sines once a step instead of to x in every layer.
        signed_sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)[0].unsqueeze(1)
        return cos[0].unsqueeze(1), signed_sin


class StackNorm:
    """Root mean square normalisation over the last dimension, in as few operations as the device allows."""

    def __init__(self, norm: LlamaNorm, gains: torch.Tensor | None = None) -> None:
        """`gains`: [..., width] in place of the module's own weight."""
        self.gains = norm.weight.detach() if gains is None else gains
        self._width = self.gains.shape[-1]
        self.eps = norm.variance_epsilon
        self._eps_tensor = torch.tensor(self.eps, device=self.gains.device)
        # On a GPU PyTorch normalises with one kernel. On a CPU it runs seven, which only half precision needs.
        self._few_operations = self.gains.device.type == "cpu" and self.gains.dtype == torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._few_operations:
            return rms_norm(x, (self._width,), None, self.eps) * self.gains
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps_tensor, length, length, value=1 / self._width).rsqrt_()
        return (x * scale).mul_(self.gains)


class StackLayer:
    """One decoder layer."""

    def __init__(self, layer: LlamaLayer, index: int, make: ProjectionMaker) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index = index
        self.head_dim = attention.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.scaling = attention.scaling
        self.attention_norm = StackNorm(layer.input_layernorm)
        self.mlp_norm = StackNorm(layer.post_attention_layernorm)
        self.qkv = fuse_linears((attention.q_proj, attention.k_proj, attention.v_proj), make)
        self.output = fuse_linears((attention.o_proj,), make)
        self.gate_up = fuse_linears((mlp.gate_proj, mlp.up_proj), make)
        self.down = fuse_linears((mlp.down_proj,), make)
        self._width = mlp.gate_proj.out_features
        self.activation = mlp.act_fn
        self.qk_norm = None
        if has_qk_norm(attention):
            q, k = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
            gains = torch.cat((q.expand(self.num_heads, -1), k.expand(self.num_kv_heads, -1)))
            self.qk_norm = StackNorm(attention.q_norm, gains)

    def __call__(
        self, hidden: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, context: RowContext
    ) -> torch.Tensor:
        tokens, heads, kv_heads, dim = hidden.shape[0], self.num_heads, self.num_kv_heads, self.head_dim
        qkv = self.qkv.forward(self.attention_norm(hidden))
        qk = qkv[:, : (heads + kv_heads) * dim].view(tokens, heads + kv_heads, dim)
        normed = qk if self.qk_norm is None else self.qk_norm(qk)
        # In place, so that rotated keys and plain values are adjacent, as in the cache's rows.
        if torch.compiler.is_compiling():  # `torch.compile` refuses an `out` that is not contiguous
            qk.copy_(torch.addcmul(normed * cos, normed.roll(dim // 2, -1), signed_sin))
        else:
            torch.addcmul(normed * cos, normed.roll(dim // 2, -1), signed_sin, out=qk)
        attended = context.attend_rows(self._index, qk[:, :heads], qkv[:, heads * dim :], self.scaling, None)
        hidden = self.output.add_to(hidden, attended.reshape(tokens, -1))
        gate_up = self.gate_up.forward(self.mlp_norm(hidden))
        gated = self.activation(gate_up[:, : self._width]) * gate_up[:, self._width :]
        return self.down.add_to(hidden, gated)
