"""Memory of the recurrent layers of a hybrid, from its config.json. Reads no weights.

A session holds states of one size, however long it is; only the layers that attend have a KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.checkpoints.counts import MOST, require_count

#: Bytes of a number of a recurrent state, and of a row that a convolution keeps.
_STATE_NUMBER_BYTES, _WINDOW_NUMBER_BYTES = 4, 2

_ATTENTION = ("full_attention", "sliding_attention", "attention", "hybrid")
_RECURRENT = ("linear_attention", "mamba", "conv", "hybrid")
# Letters of `hybrid_override_pattern`.
_LETTERS = {"M": "mamba", "*": "attention"}


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Layers of a model by what they keep."""

    num_layers: int
    num_attention: int
    state_bytes: int
    """Bytes of one session's state in all recurrent layers; 0 if there are none."""


def count_layers(model: str, text: Mapping[str, Any], num_layers: int) -> LayerCounts:
    """Return the layers that a configuration states.

    Args:
        model: name of the model.
        text: its configuration, or the part of it for text.
        num_layers: number of layers that it states; 0: their kinds tell it.

    Raises:
        InvalidRequest: a size is not a whole number in its range.
    """
    kinds = _kinds(text, num_layers)
    num_recurrent = sum(kind in _RECURRENT for kind in kinds)
    if not num_recurrent:
        return LayerCounts(num_layers, num_layers, 0)
    return LayerCounts(len(kinds), sum(kind in _ATTENTION for kind in kinds), num_recurrent * _layer_bytes(model, text))


def _kinds(text: Mapping[str, Any], num_layers: int) -> list[str]:
    for key in ("layer_types", "layers_block_type"):
        if isinstance(stated := text.get(key), list):
            return [str(kind) for kind in stated[: num_layers or None]]
    if isinstance(pattern := text.get("hybrid_override_pattern"), str):
        return [_LETTERS.get(letter, "mlp") for letter in pattern[: num_layers or None]]
    if text.get("model_type") == "falcon_h1":
        return ["hybrid"] * num_layers
    if "linear_num_value_heads" in text:
        every = text.get("full_attention_interval") or 4
        return ["full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(num_layers)]
    return []


def _layer_bytes(model: str, text: Mapping[str, Any]) -> int:
    """Return the bytes of one session's state in one recurrent layer."""

    def size(*keys: str, default: int = 0) -> int:
        stated = (require_count(model, key, text.get(key), most=MOST) for key in keys)
        return next(filter(None, stated), default)

    if value_heads := size("linear_num_value_heads"):
        key_dim, value_dim = size("linear_key_head_dim", default=128), size("linear_value_head_dim", default=128)
        state = value_heads * key_dim * value_dim
        channels = 2 * size("linear_num_key_heads") * key_dim + value_heads * value_dim
        width = size("linear_conv_kernel_dim", default=4)
    elif heads := size("mamba_n_heads", "mamba_num_heads"):
        head_dim, depth = size("mamba_d_head", "mamba_head_dim", default=64), size("mamba_d_state", "ssm_state_size")
        state = heads * head_dim * depth
        channels = heads * head_dim + 2 * size("mamba_n_groups", "n_groups", default=1) * depth
        width = size("mamba_d_conv", "conv_kernel", default=4)
    else:
        state, channels, width = 0, size("hidden_size"), size("conv_L_cache", default=3)
    return state * _STATE_NUMBER_BYTES + (width - 1) * channels * _WINDOW_NUMBER_BYTES
