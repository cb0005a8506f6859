"""Weights of a draft head that is one decoder layer on the target's features, for workers that compute it themselves.

Made by `engine.heads.eagle3`, read by `engine.native.draft_head`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Weights(NamedTuple):
    """Weight and bias of a linear layer."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]


@dataclass(frozen=True, slots=True)
class FeatureLayer:
    """The layer reads a token's embedding and the feature of the position before it, each normalised (H numbers each).

    No position attends to position 0, which has no feature before it: see `engine.heads.first_position_mask`.
    """

    features: Weights
    """Projection of the concatenated outputs of the target's layers to a feature."""
    qkv: Weights  # inputs: 2 * H
    output: Weights
    gate_up: Weights
    down: Weights
    head: Weights
    """Head of the logits, in the head's own vocabulary; `widen` maps them to the target's."""
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
    """Count of extra numbers that keys and values have in the cache."""
    unseen: float
    """Last extra number of keys at position 0; all other extra numbers are 0."""
    adds_normed: bool
    """True if the layer's outputs are added to the normalised feature, False if to the feature itself."""
    keeps_normed: bool
    """True if a drafted token's feature is the normalised output, False if the output itself."""
    widen: Callable[[torch.Tensor], torch.Tensor]
    """Map [T, logits of the head] to [T, V], the logits of the target's tokens."""
