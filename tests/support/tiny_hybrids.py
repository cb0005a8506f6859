"""Configurations of tiny hybrids: models whose layers mix tokens by recurrences and by attention.

`tiny_models` builds checkpoints from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

_Sizes = dict[str, Any]
Plan = tuple[type[PreTrainedConfig], Callable[[_Sizes], _Sizes]]


def _common(sizes: _Sizes) -> _Sizes:
    return {
        "hidden_size": sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "intermediate_size": sizes["mlp"],
        "max_position_embeddings": sizes["context"],
        "tie_word_embeddings": False,
    }


def _kinds(sizes: _Sizes, recurrent: str, attention: str = "full_attention") -> list[str]:
    """Return every second layer's kind as attention, the others as recurrent; the first is recurrent."""
    return [attention if layer % 2 else recurrent for layer in range(sizes["layers"])]


def _delta(sizes: _Sizes) -> _Sizes:
    return _common(sizes) | {
        "head_dim": 32,
        "layer_types": _kinds(sizes, "linear_attention"),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
    }


def _experts(sizes: _Sizes) -> _Sizes:
    return {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": sizes["mlp"] // 2,
        "shared_expert_intermediate_size": sizes["mlp"] // 2,
    }


def _nemotron_h(sizes: _Sizes) -> _Sizes:
    """`time_step_min` is too low to matter, because `generate()` applies it to the prompt and not to later tokens."""
    pattern = ("mamba", "mlp", "attention")
    return _common(sizes) | {
        "layers_block_type": [pattern[layer % 3] for layer in range(sizes["layers"])],
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 32,
        "time_step_min": 1e-6,
    }


def _mamba(sizes: _Sizes) -> _Sizes:
    return _common(sizes) | {
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "mamba_expand": 2,
        "mamba_chunk_size": 32,
    }


HYBRIDS: dict[str, Plan] = {
    "lfm2": (Lfm2Config, lambda sizes: _common(sizes) | {"layer_types": _kinds(sizes, "conv")}),
    "lfm2_moe": (
        Lfm2MoeConfig,
        lambda sizes: _common(sizes) | _experts(sizes) | {"layer_types": _kinds(sizes, "conv"), "num_dense_layers": 1},
    ),
    "qwen3_5": (Qwen3_5TextConfig, _delta),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, lambda sizes: _delta(sizes) | _experts(sizes)),
    "qwen3_next": (Qwen3NextConfig, lambda sizes: _delta(sizes) | _experts(sizes)),
    "granite_hybrid": (
        GraniteMoeHybridConfig,
        lambda sizes: _mamba(sizes) | {
            "layer_types": _kinds(sizes, "mamba", "attention"), "num_local_experts": 0,
            "shared_intermediate_size": sizes["mlp"], "attention_multiplier": 0.25, "embedding_multiplier": 2.0,
            "residual_multiplier": 0.7, "logits_scaling": 1.5,
        },
    ),
    "nemotron_h": (NemotronHConfig, _nemotron_h),
    "falcon_h1": (FalconH1Config, lambda sizes: _mamba(sizes) | {"head_dim": 16, "mamba_d_ssm": 128}),
    "olmo_hybrid": (
        OlmoHybridConfig,
        lambda sizes: _common(sizes) | {
            "layer_types": _kinds(sizes, "linear_attention"), "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 24,
        },
    ),
}  # fmt: skip
