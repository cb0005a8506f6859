"""Give a configuration every number that a GGUF file's metadata states, or refuse the file by the number's name.

transformers reads some keys of each architecture and leaves the others at the defaults of its classes, which are other
checkpoints' values. Here each `ARCHITECTURE.*` key is set on the configuration, or has a value that changes nothing, or
is refused. Keys that a file leaves out have the values that llama.cpp gives them. llama.cpp stores Llama 3's scaling of
rotary frequencies as the resulting divisor of each one; its parameters are recovered from those. Called by
`specdec.checkpoints.gguf_convert`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

DIVISORS = "rope_freqs.weight"

#: Parameters of every Llama since 3.1. Their factors differ (8 and 32), so the factor is taken from the file.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_CONTEXT = 1.0, 4.0, 8192
#: Relative tolerance of the comparison: the divisors are stored as float32.
_TOLERANCE = 1e-5

#: Types of models whose numbers are all known here.
_TYPES = {"llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "starcoder2", "gpt2", "nemotron",
          "gemma2", "gemma3_text"}  # fmt: skip
#: Those that rotate a part of each head, those whose layers may attend within a window, and those whose configuration
#: names the kind of each layer.
_PARTIAL, _WINDOWED, _BY_LAYER = (
    {"phi3", "nemotron"},
    {"mistral", "phi3", "starcoder2", "gemma2", "gemma3_text"},
    {"gemma2", "gemma3_text"},
)
#: Number of layers of the Gemma models that scale attention by the width of the model instead of by that of a head.
#: Source: llama.cpp, `llama_model::load_hparams`.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3_text": 62}

#: Names of a number in configurations; the first one that the type of model has is set.
_NAMES = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("norm_epsilon", "norm_eps", "layer_norm_epsilon"),
    "vocab_size": ("vocab_size",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
#: Values that change nothing in a model that does not have the number.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "expert_gating_func": (0, 1),  # 1: softmax, which all types here use
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.causal": (True,),
    "pooling_type": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
}
#: Keys of RoPE's scaling and the values that mean none, if no type of scaling is stated; None: any value.
_UNSCALED: Mapping[str, tuple[object, ...] | None] = {
    "rope.scaling.factor": (0, 1),
    "rope.scale_linear": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.original_context_length": None,
    "rope.scaling.finetuned": None,
}


class NotConverted(Exception):
    """transformers reads the file wrongly or not at all. The message continues a sentence that starts with its name."""


def settle(config: PreTrainedConfig, metadata: Mapping[str, Any], divisors: np.ndarray | None) -> None:
    """Set every number of a file on its configuration.

    Args:
        config: configuration that transformers made from the file; changed in place.
        metadata: metadata of the file.
        divisors: the tensor `DIVISORS` of the file; None if it has none.  [D/2]

    Raises:
        NotConverted: a number is not supported for this type of model; the message has its key and value.
    """
    architecture, stated = metadata["general.architecture"], _stated(metadata)
    if config.model_type not in _TYPES:
        raise NotConverted(f"holds a model of an unsupported type: {architecture}")
    try:
        _settle(config, stated, divisors)
    except _Unsupported as error:
        name = str(error)
        raise NotConverted(
            f"uses an unsupported {'RoPE scaling' if 'scal' in name and 'rope' in name else 'number'}: "
            f"{architecture}.{name} = {str(stated.get(name))[:64]}, for a model of type {config.model_type}"
        ) from error


def require_equal_layers(metadata: Mapping[str, Any]) -> None:
    """Refuse a file with a number for each layer if configurations have one for all. Raises NotConverted."""
    for name, value in _stated(metadata).items():
        if name in _NAMES and isinstance(value, list):
            key = f"{metadata['general.architecture']}.{name}"
            raise NotConverted(f"uses an unsupported number: {key} = {str(value)[:64]}, one for each layer")


def _stated(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of the model by their keys without the architecture."""
    prefix = f"{metadata['general.architecture']}."
    return {key.removeprefix(prefix): _shortest(value) for key, value in metadata.items() if key.startswith(prefix)}


def _shortest(value: Any) -> Any:
    """Return the shortest decimal number with the 32 bits of a float, which is the one that was stored."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


class _Unsupported(Exception):
    """A number is not supported; the message is its key without the architecture."""


def _settle(config: PreTrainedConfig, stated: Mapping[str, Any], divisors: np.ndarray | None) -> None:
    left = dict(stated)
    for name in tuple(left):
        if _set_number(config, name, left[name]):
            del left[name]
    _set_windows(config, left)
    _set_heads(config, stated, left)
    _require_unscaled(config, left)
    if getattr(config, "rope_parameters", None):
        _set_rope(config, left)
        _set_divisors(config, divisors)
    if (padding := config.pad_token_id) is not None and padding >= config.vocab_size:  # a default of the class
        config.pad_token_id = None
    for name, value in left.items():
        if value not in _NEUTRAL.get(name, ()):
            raise _Unsupported(name)


def _set_number(config: PreTrainedConfig, name: str, value: Any) -> bool:
    """Set a number that the type of model has by itself, and return whether it has it."""
    known = type(config)()
    ours = next((ours for ours in _NAMES.get(name, ()) if hasattr(known, ours)), None)
    if ours is None:
        return False
    setattr(config, ours, None if name.endswith("softcapping") and not value else value)
    return True


def _set_windows(config: PreTrainedConfig, left: dict[str, Any]) -> None:
    window, pattern = left.pop("attention.sliding_window", None), left.pop("attention.sliding_window_pattern", None)
    is_wide = not window or window >= config.max_position_embeddings
    if config.model_type in _WINDOWED:
        if window is not None or config.model_type == "mistral":
            config.sliding_window = window or None
    elif not is_wide:
        left["attention.sliding_window"] = window
    if pattern is None or (is_wide and config.model_type not in _BY_LAYER):
        return
    if config.model_type not in _BY_LAYER:
        left["attention.sliding_window_pattern"] = pattern
        return
    layers = range(config.num_hidden_layers)
    slides = (
        pattern if isinstance(pattern, list) else [not pattern or index % pattern < pattern - 1 for index in layers]
    )
    config.layer_types = ["sliding_attention" if slides[index] else "full_attention" for index in layers]


def _set_heads(config: PreTrainedConfig, stated: Mapping[str, Any], left: dict[str, Any]) -> None:
    """Set the width of a head and the scale of attention; leave widths that are not the same."""
    equal = config.hidden_size // config.num_attention_heads
    if hasattr(type(config)(), "head_dim") and "attention.key_length" not in stated:
        is_llama = config.model_type in ("llama", "mistral")  # whose older files state the width here
        config.head_dim = stated.get("rope.dimension_count", equal) if is_llama else equal
    width = getattr(config, "head_dim", None) or equal
    for name in ("attention.key_length", "attention.value_length"):
        if left.get(name) == width:
            del left[name]
    if (num_layers := _SCALED_BY_WIDTH.get(config.model_type)) is not None:
        config.query_pre_attn_scalar = equal if config.num_hidden_layers == num_layers else width


def _require_unscaled(config: PreTrainedConfig, left: dict[str, Any]) -> None:
    kind = left.pop("rope.scaling.type", None)
    if kind not in (None, "none"):
        raise _Unsupported("rope.scaling.type")
    original = left.get("rope.scaling.original_context_length")
    if original is not None and hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = original
    for name in [name for name in left if name.startswith("rope.scal")]:
        neutral = _UNSCALED.get(name, ())
        if kind is None and neutral is not None and left[name] not in neutral:
            raise _Unsupported(name)
        del left[name]


def _set_rope(config: PreTrainedConfig, left: dict[str, Any]) -> None:
    """Set base and width of the rotation, whose defaults are those of llama.cpp."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = left.pop("rope.dimension_count", head)
    if width != head and config.model_type not in _PARTIAL:
        left["rope.dimension_count"] = width
    base = float(left.pop("rope.freq_base", 10_000.0))
    if "full_attention" in config.rope_parameters:
        local = float(left.pop("rope.freq_base_swa", 10_000.0))
        config.rope_parameters["full_attention"]["rope_theta"] = base
        config.rope_parameters["sliding_attention"]["rope_theta"] = local
        return
    config.rope_parameters["rope_theta"] = base
    if config.model_type in _PARTIAL:
        share = width / head
        config.rope_parameters["partial_rotary_factor"] = (
            share if int(head * share) == width else math.nextafter(share, 1)
        )


def _set_divisors(config: PreTrainedConfig, divisors: np.ndarray | None) -> None:
    """Set Llama 3's scaling if the divisors have its form. Only this scaling is supported."""
    if divisors is None:
        return
    parameters = {
        "rope_type": "llama3",
        "rope_theta": config.rope_parameters.get("rope_theta", 0.0),
        "factor": float(divisors.max()),
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": _HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _ORIGINAL_CONTEXT,
    }
    is_llama = config.model_type in ("llama", "mistral")
    if not is_llama or not np.allclose(divisors, llama3_divisors(len(divisors), parameters), rtol=_TOLERANCE):
        raise NotConverted(f"uses an unsupported RoPE scaling: its tensor {DIVISORS}")
    config.rope_parameters = parameters


def llama3_divisors(num_frequencies: int, parameters: Mapping[str, Any]) -> np.ndarray:
    """Return the divisor of each rotary frequency under Llama 3's scaling.  [D/2]

    Source: llama.cpp, `convert_hf_to_gguf.py` (LlamaModel.generate_extra_tensors).
    """
    frequencies = parameters["rope_theta"] ** (np.arange(num_frequencies) / -num_frequencies)
    wavelengths = 2 * math.pi / frequencies
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] / wavelengths
    share = np.clip((turns - low) / (high - low), 0, 1)
    divisors: np.ndarray = 1 / ((1 - share) / parameters["factor"] + share)
    return divisors
