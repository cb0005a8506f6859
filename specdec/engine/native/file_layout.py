"""The kernels' structures of a Llama-shaped model in a GGUF file, packed from the mapped file.

A model from modules is laid out by `model_layout`. Called by `specdec.engine.loader` and
`specdec.engine.kept_worker`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from specdec.checkpoints.gguf.weights import Weight
from specdec.engine.native.file_rows import widened
from specdec.engine.native.packing import PackedModel, Packing
from specdec.engine.native.structures import Layer, Model, Product

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LlamaNumbers:
    """Numbers of a model that the kernels need besides its weights."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    epsilon: float
    qk_epsilon: float
    scaling: float
    windows: tuple[int, ...]
    """Window of each layer; 0 without one."""

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields of `Model` that are these numbers."""
        return {name: value for name, value in asdict(self).items() if name != "windows"}


@dataclass(frozen=True, slots=True)
class FromFile:
    """Numbers and tables with which a later start lays the model of a file out."""

    numbers: LlamaNumbers
    rotary: tuple[torch.Tensor, torch.Tensor]
    """Cosines and sines, float32 [positions, head_dim] each."""


class FileLayout:
    """Builds the structures and keeps the memory that they point to."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: Mapping[str, Weight],
        from_file: FromFile,
        caches: Sequence[int],
    ) -> None:
        """Pack the weights.

        Args:
            library: the kernels.
            weights: the weights of the model by the names that transformers gives them.
            from_file: its numbers and rotary tables.
            caches: address of each layer's KV pool.
        """
        self._library, self._weights, self._numbers = library, weights, from_file.numbers
        self._packing = packing = Packing(library, is_compact=True)
        cosines, sines = from_file.rotary
        self._layers = (Layer * len(caches))(*(self._layer(index, cache) for index, cache in enumerate(caches)))
        embeddings = weights[EMBEDDINGS]
        model = Model(
            layers=self._layers,
            num_layers=len(caches),
            cosines=packing.keep(cosines),
            sines=packing.keep(sines),
            final_gains=self._vector("model.norm.weight"),
            head=packing.rows_product([weights.get(HEAD, embeddings)], self._bias(["lm_head"])),
            **from_file.numbers.fields,
            **packing.embedding_rows(embeddings),
        )
        self.packed = PackedModel(packing, model, embeddings.shape[0])

    def _layer(self, index: int, cache: int) -> Layer:
        name = f"model.layers.{index}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        return Layer(
            qkv=self._product([f"{attention}.{each}_proj" for each in "qkv"]),
            output=self._product([f"{attention}.o_proj"]),
            gate_up=self._product([f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
            down=self._product([f"{mlp}.down_proj"]),
            attention_gains=self._vector(f"{name}.input_layernorm.weight"),
            mlp_gains=self._vector(f"{name}.post_attention_layernorm.weight"),
            qk_gains=self._qk_gains(attention),
            cache=cache,
            window=self._numbers.windows[index],
        )

    def _product(self, names: Sequence[str]) -> Product:
        return self._packing.rows_product([self._weights[f"{name}.weight"] for name in names], self._bias(names))

    def _bias(self, names: Sequence[str]) -> torch.Tensor | None:
        if f"{names[0]}.bias" not in self._weights:
            return None
        return torch.cat([widened(self._weights[f"{name}.bias"], self._library) for name in names])

    def _vector(self, name: str) -> int:
        return self._packing.keep(widened(self._weights[name], self._library))

    def _qk_gains(self, attention: str) -> int | None:
        if f"{attention}.q_norm.weight" not in self._weights:
            return None
        numbers = self._numbers
        q, k = (widened(self._weights[f"{attention}.{each}_norm.weight"], self._library) for each in "qk")
        return self._packing.keep(torch.cat((q.expand(numbers.heads, -1), k.expand(numbers.kv_heads, -1))))
