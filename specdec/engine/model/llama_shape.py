"""Types of the modules of a Llama-shaped model, which PyTorch's own types do not describe.

`LlamaStack.fits` checks that a model has this shape. Read by `engine.model.llama_stack` and
`engine.native.native_runner`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeGuard

import torch
from torch import nn


class LlamaNorm(Protocol):
    """Root mean square normalisation."""

    weight: nn.Parameter  # [width]
    variance_epsilon: float


class LlamaAttention(Protocol):
    head_dim: int
    scaling: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear


class NormedAttention(LlamaAttention, Protocol):
    """Attention that normalises queries and keys, head by head."""

    q_norm: LlamaNorm
    k_norm: LlamaNorm


class LlamaMlp(Protocol):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    act_fn: Callable[[torch.Tensor], torch.Tensor]


class LlamaLayer(Protocol):
    """One decoder layer."""

    self_attn: LlamaAttention
    mlp: LlamaMlp
    input_layernorm: LlamaNorm
    post_attention_layernorm: LlamaNorm


def has_qk_norm(attention: LlamaAttention) -> TypeGuard[NormedAttention]:
    """Return whether attention normalises queries and keys."""
    return hasattr(attention, "q_norm")
