"""The kernels' structures of a draft head with one decoder layer.

A full step also computes the head's features and KV; a draft step of the head is a separate kernel call. The weights
come from `engine.model.feature_layer`; `engine.heads.interface` explains the method. Called by `native_runner`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from specdec.engine.model.feature_layer import FeatureLayer, Weights
from specdec.engine.model.kv_cache import LayerKv
from specdec.engine.native.packing import Packing
from specdec.engine.native.structures import HeadStructure, Layer, Model, Product


class NativeHead:
    """One draft head. It does not own its cache."""

    def __init__(self, packing: Packing, layer: FeatureLayer, cached: Sequence[LayerKv], taps: Sequence[int]) -> None:
        """
        Args:
            packing: packs and keeps the weights.
            layer: a layer that `fits`.
            cached: caches of its features and of its KV.
            taps: indices of the tapped layer outputs that it reads.
        """
        features, kv = cached
        self._packing = packing
        self._layer = Layer(
            qkv=self._product(layer.qkv),
            output=self._product(layer.output),
            gate_up=self._product(layer.gate_up),
            down=self._product(layer.down),
            attention_gains=packing.keep(layer.embedding_gains),
            mlp_gains=packing.keep(layer.mlp_gains),
            qk_gains=None if layer.qk_gains is None else packing.keep(layer.qk_gains),
            cache=kv.rows.data_ptr(),
            mark=layer.mark,
            unseen=layer.unseen,
        )
        self.structure = HeadStructure(
            model=self._model(layer),
            features_of=self._product(layer.features),
            taps=packing.keep(torch.tensor(taps, dtype=torch.int64)),
            num_taps=len(taps),
            feature_gains=packing.keep(layer.feature_gains),
            features=features.rows.data_ptr(),
            adds_normed=layer.adds_normed,
            keeps_normed=layer.keeps_normed,
        )
        self.num_inputs = max(layer.qkv.weight.shape[1], layer.features.weight.shape[1])
        """Number of inputs of its widest product over joined rows."""
        self.widen = layer.widen

    @staticmethod
    def fits(library: ctypes.CDLL, layer: FeatureLayer, target: Model, num_embeddings: int) -> bool:
        """Return whether the kernels support this head for a supported target with token ids below `num_embeddings`."""
        width = layer.embedding.shape[1]
        return (
            width == target.hidden
            and len(layer.embedding) >= num_embeddings
            and bool(library.specdec_fits(width, layer.head_dim))
        )

    def _model(self, layer: FeatureLayer) -> Model:
        embeddings, embedding_format = self._packing.embedding(layer.embedding)
        return Model(
            layers=ctypes.pointer(self._layer),
            num_layers=1,
            hidden=layer.embedding.shape[1],
            heads=layer.num_heads,
            kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            mlp=layer.down.weight.shape[1],
            embeddings=embeddings,
            embedding_format=embedding_format,
            cosines=self._packing.keep(layer.cosines),
            sines=self._packing.keep(layer.sines),
            final_gains=self._packing.keep(layer.final_gains),
            head=self._product(layer.head),
            epsilon=layer.epsilon,
            qk_epsilon=layer.epsilon,
            scaling=layer.head_dim**-0.5,
        )

    def _product(self, weights: Weights) -> Product:
        return self._packing.product(weights.weight, weights.bias)
