"""A draft head that is one decoder layer on the target's features, as plain weights: for workers that compute it by
themselves.

Nothing is computed here. Told by `engine.heads.eagle3`, read by `engine.native.draft_head`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Weights(NamedTuple):
    """Of a product."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]


@dataclass(frozen=True, slots=True)
class FeatureLayer:
    """The layer reads a token's embedding beside the feature of the position before it, each normed (H numbers each).

    Nobody attends to position 0, which has no feature before it: see `engine.heads.first_position_mask`.
    """

    features: Weights
    """From the outputs of the target's layers, side by side, to a feature."""
    qkv: Weights  # inputs: 2 * H
    output: Weights
    gate_up: Weights
    down: Weights
    head: Weights
    """Of the logits; each of these stands for a token as `widen` says."""
    embedding_gains: torch.Tensor  # [H]
    feature_gains: torch.Tensor  # [H]
    mlp_gains: torch.Tensor  # [H]
    qk_gains: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]
    final_gains: torch.Tensor  # [H]
    epsilon: float
    embedding: torch.Tensor  # [rows, H]
    cosines: torch.Tensor  # [positions, head_dim]
    sines: torch.Tensor  # [positions, head_dim]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mark: int
    """Numbers by which keys and values are longer in the cache."""
    unseen: float
    """The last of them, of keys at position 0; all others are 0."""
    adds_normed: bool
    """Whether the layer's outputs are added to the normed feature, or to the feature as it is."""
    keeps_normed: bool
    """Whether a drafted token's feature is the normed output, or the output as it is."""
    widen: Callable[[torch.Tensor], torch.Tensor]
    """[T, logits of the head] -> [T, V], of the target's tokens."""
