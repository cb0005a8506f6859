"""The kernels' structures of a whole model, and of its early exits.

The weights are packed by `packing`. Called by `engine.loader`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.engine.linear.int8 import round_to_int8
from specdec.engine.model.batch import AttentionKind
from specdec.engine.model.early_exit import EarlyExit
from specdec.engine.model.kv_cache import KvCache
from specdec.engine.model.llama_shape import LlamaLayer, has_qk_norm
from specdec.engine.model.llama_stack import LlamaStack
from specdec.engine.native.file_layout import LlamaNumbers
from specdec.engine.native.packing import MOST_INT8_INPUTS, PackedModel, Packing
from specdec.engine.native.structures import Layer, Model, Product


def fits(library: ctypes.CDLL, model: PreTrainedModel) -> bool:
    """Return whether the kernels support this model."""
    if not LlamaStack.fits(model) or model.device.type != "cpu" or model.dtype != torch.float32:
        return False
    attention = model.model.layers[0].self_attn
    fits = library.specdec_fits(attention.q_proj.in_features, attention.head_dim)
    widest = max(attention.q_proj.in_features, attention.q_proj.out_features, model.config.intermediate_size)
    return bool(fits) and widest <= MOST_INT8_INPUTS and model.config.hidden_act in ("silu", "swish")


def round_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [out, in] with the rounding of int8 weights."""
    return round_to_int8(weight).rounded()


def llama_numbers(model: PreTrainedModel, kinds: Sequence[AttentionKind]) -> LlamaNumbers:
    """Return the numbers of a model that `fits`; `kinds`: attention kind of each layer."""
    inner = model.model
    attention = inner.layers[0].self_attn
    return LlamaNumbers(
        hidden=attention.q_proj.in_features,
        heads=attention.q_proj.out_features // attention.head_dim,
        kv_heads=attention.k_proj.out_features // attention.head_dim,
        head_dim=attention.head_dim,
        mlp=model.config.intermediate_size,
        epsilon=inner.norm.variance_epsilon,
        qk_epsilon=getattr(attention, "q_norm", inner.norm).variance_epsilon,
        scaling=attention.scaling,
        windows=tuple(kind.window or 0 for kind in kinds),
    )


def rotary_tables(model: PreTrainedModel, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, float32 [positions, head_dim] each."""
    with torch.inference_mode():
        cosines, sines = model.model.rotary_emb(torch.empty(0), torch.arange(num_positions).unsqueeze(0))
    return cosines[0], sines[0]


class ModelLayout:
    """Builds the structures and keeps the memory that they point to."""

    def __init__(
        self,
        packing: Packing,
        model: PreTrainedModel,
        cache: KvCache,
        kinds: Sequence[AttentionKind],
        max_context_tokens: int,
        *,
        is_int8: bool,
    ) -> None:
        """Take the weights of `model` over layer by layer; the model cannot run afterwards.

        Args:
            packing: packs and keeps the weights.
            model: a model that `fits`.
            cache: the KV pool.
            kinds: attention kind of each layer.
            max_context_tokens: number of positions in the rotary tables.
            is_int8: round the layers' weights to integers.
        """
        self._packing = packing
        inner, numbers = model.model, llama_numbers(model, kinds)
        cosines, sines = rotary_tables(model, max_context_tokens)
        self._layers = (Layer * len(inner.layers))()
        for index, kind in enumerate(kinds):
            self._layers[index] = self._layer(inner.layers[index], cache, index, kind, is_int8)
            inner.layers[index] = nn.Identity()
        embeddings, embedding_format = packing.embedding(inner.embed_tokens.weight)
        model_structure = Model(
            layers=self._layers,
            num_layers=len(self._layers),
            embeddings=embeddings,
            embedding_format=embedding_format,
            cosines=packing.keep(cosines),
            sines=packing.keep(sines),
            final_gains=packing.keep(inner.norm.weight),
            # The output head stays exact: with rounded weights the two best logits would often tie.
            head=self._product([model.lm_head], is_int8=False),
            **numbers.fields,
        )
        num_embeddings = len(cast(nn.Embedding, model.get_input_embeddings()).weight)
        self.packed = PackedModel(packing, model_structure, num_embeddings)

    def early_exit(self, early_exit: EarlyExit, head: nn.Linear) -> Model:
        """Return the model with fewer layers, its adapter multiplied into the output head."""
        short = Model.from_buffer_copy(self.packed.model)
        short.num_layers = early_exit.num_layers
        short.num_tapped = short.num_draft_heads = 0
        if early_exit.adapter is not None:
            adapted = nn.Linear(head.in_features, head.out_features, device="meta")
            weight, bias = early_exit.adapter.of_head(head.weight.detach(), head.bias)
            adapted.weight = nn.Parameter(weight, requires_grad=False)
            adapted.bias = nn.Parameter(bias, requires_grad=False)
            short.head = self._product([adapted], is_int8=False)
        return short

    def _layer(self, layer: LlamaLayer, cache: KvCache, index: int, kind: AttentionKind, is_int8: bool) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qk_gains = None
        if has_qk_norm(attention):
            heads = attention.q_proj.out_features // attention.head_dim
            kv_heads = attention.k_proj.out_features // attention.head_dim
            q, k = attention.q_norm.weight, attention.k_norm.weight
            qk_gains = self._packing.keep(torch.cat((q.expand(heads, -1), k.expand(kv_heads, -1))))
        return Layer(
            qkv=self._product([attention.q_proj, attention.k_proj, attention.v_proj], is_int8),
            output=self._product([attention.o_proj], is_int8),
            gate_up=self._product([mlp.gate_proj, mlp.up_proj], is_int8),
            down=self._product([mlp.down_proj], is_int8),
            attention_gains=self._packing.keep(layer.input_layernorm.weight),
            mlp_gains=self._packing.keep(layer.post_attention_layernorm.weight),
            qk_gains=qk_gains,
            cache=cache.layers[index].rows.data_ptr(),
            window=kind.window or 0,
        )

    def _product(self, linears: Sequence[nn.Linear], is_int8: bool) -> Product:
        """Return one product of several linear layers that share their input, with their outputs side by side."""
        weight = torch.cat([linear.weight.detach() for linear in linears])  # [outputs, inputs]
        bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
        return self._packing.product(weight, bias, is_int8=is_int8)
