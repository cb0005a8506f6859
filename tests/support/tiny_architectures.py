"""A tiny random checkpoint of every decoder-only class that the installed transformers has, from its own configuration.

Not a list of ours: the model types are transformers' own mapping, and a configuration is its default one with every
number of layers, heads, experts, widths, windows and tokens made small by its name (`_shrink`). What a type needs more
stands in `_SPECIAL`. `tests.support.tiny_models` builds the few promised architectures with more care. Called by
`tests.integration.test_every_architecture` and `tests.support.architecture_rig`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from tests.support.tiny_models import EOS_TOKEN_ID, UNK_TOKEN_ID, save_tokenizer

#: Types of models that read more than text.
MULTIMODAL_TYPES = frozenset(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
MODEL_TYPES: tuple[str, ...] = tuple(sorted(MULTIMODAL_TYPES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()))

VOCABULARY_SIZE = 96
CONTEXT = 256
#: No multiple of the KV block, and shorter than what is compared.
WINDOW = 24
#: At least two, and one of each kind of layer that the type has by default, within reason.
_MOST_LAYERS = 4
#: Configurations that name their sizes in other ways keep more.
_MOST_WEIGHTS = 5e7

#: The first pattern that a setting's name contains decides; larger numbers are cut to this one.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab", VOCABULARY_SIZE),
    (r"max_position|n_positions|n_ctx|max_seq_len|model_max_length|^max_length|original_max", CONTEXT),
    (r"window|local_attention$|attention_chunk_size", WINDOW),
    (r"layer_start_index|moe_layer_interval|decoder_sparse_step", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"^(num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers|num_layers_per_stack)$", 2),
    (r"key_value_heads|kv_heads|groups", 2),
    (r"per_tok|topk$|moe_k$", 2),
    (r"n_group|topk_group|expert_group|shared_experts", 1),
    (r"experts|expert_num", 4),
    (r"rotary_dim", 8),
    (r"head_dim|kv_channels|attention_head_size|dim_head|d_head$", 16),
    (r"heads?$|heads_per|num_attention_heads", 4),
    (r"rank", 32),
    (r"intermediate|ffn|inner|dff|dim_ff|feed_forward", 96),
    (r"size|dim|width|d_model|n_embd", 64),
)
_NOT_SIZES = re.compile(
    r"qk_head_dim|type_vocab|token|multiple|interval_|patch_size|conv|image_size|block_size|chunk_size_lm"
)

#: Types whose class saves weights under names that it does not read.
_NOT_READ_BACK = ("shieldgemma2",)

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")

#: What a type needs beyond smaller numbers.
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32}
#: Sections of the rotated half of a head of 16 numbers.
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_HALF_MROPE = {"rope_parameters": _MROPE["rope_parameters"] | {"mrope_section": [1, 1, 2]}}
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA,
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96},
        "num_key_value_heads": 2,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4, "per_layer_config": None, "head_dim": 32},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [96, 96],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
    },
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128},
    "gemma4": {
        "vision_config": {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "head_dim": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
    },
    # Half of the layers take the keys and values of the others.
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 2,
    },
    "glm4v_moe_text": _HALF_MROPE,
    "glm4v_text": _MROPE,
    "glm_ocr_text": _MROPE,
    "granitemoehybrid": _MAMBA | {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    # Published ones have layers of both kinds; the defaults, cut short, need not.
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    # The scale of queries by position begins within the compared tokens.
    "llama4_text": {"floor_scale": 8, "attn_scale": 0.5},
    "mamba2": {"head_dim": 32},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "mistral4": {"head_dim": 32},
    "paddleocr_vl_text": _MROPE,
    "paligemma": {
        "text_config": {
            "model_type": "gemma",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "intermediate_size": 96,
            "vocab_size": 96,
            "max_position_embeddings": 256,
        },
    },
    "qwen2_5_omni_text": _MROPE,
    "qwen2_5_omni_thinker": {"vision_start_token_id": 95},
    "qwen2_5_vl_text": _MROPE,
    "qwen2_vl_text": _MROPE,
    "qwen3_omni_moe_text": _MROPE | {"use_sliding_window": False, "sliding_window": None},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 95},
    # Its own forward pass has no window.
    "qwen3_vl_moe_text": {"use_sliding_window": False, "sliding_window": None},
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "xmod": {"default_language": "en_XX"},
    "xlnet": {"d_head": 16},
}


class CannotBuild(Exception):
    """transformers makes no tiny model of this type; the message says why."""


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The default configuration of a type, made small; `changes` come last."""
    config_class = CONFIG_MAPPING[model_type]
    try:
        return config_class(**(_shrink(config_class().to_dict(), config_class) | changes))
    except Exception as error:
        raise CannotBuild(f"its configuration: {_first_line(error)}") from error


def build_tiny_architecture(model_type: str, directory: Path, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Writes a checkpoint of a random model of `model_type` into `directory`; `changes` are of its configuration.

    Of a model that reads more than text, the checkpoint has only the weights that a text needs.

    Returns:
        The model, with eager attention.

    Raises:
        CannotBuild: transformers does not make one.
    """
    if model_type in _NOT_READ_BACK:
        raise CannotBuild("the model: transformers does not read the weights that it saves")
    config = tiny_config(model_type, **changes)
    torch.manual_seed(seed)
    try:
        made_by = AutoModelForMultimodalLM if model_type in MULTIMODAL_TYPES else AutoModelForCausalLM
        with torch.device("meta"):
            num_weights = made_by.from_config(config).num_parameters()
        if num_weights > _MOST_WEIGHTS:
            raise CannotBuild(f"the model: it keeps {num_weights:.1e} weights")
        model = made_by.from_config(config, attn_implementation="eager").eval()
        _scale_weights(model, torch.Generator().manual_seed(seed))
        model.generation_config = GenerationConfig(eos_token_id=EOS_TOKEN_ID, do_sample=False)
        model.save_pretrained(directory, state_dict=_text_half(model) if model_type in MULTIMODAL_TYPES else None)
    except CannotBuild:
        raise
    except Exception as error:
        raise CannotBuild(f"the model: {_first_line(error)}") from error
    save_tokenizer(directory, VOCABULARY_SIZE)
    return model


def _text_half(model: PreTrainedModel) -> dict[str, torch.Tensor] | None:
    """The weights of the decoder, and those outside of it that the logits of a text depend on; None: no text runs."""
    try:
        model(input_ids=torch.arange(2, 32)[None], use_cache=False).logits.sum().backward()
    except Exception:  # it needs more than a text
        return None
    used = {name for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    decoder = next(name for name, module in model.named_modules() if module is model.get_decoder())
    weights = model.state_dict()
    return {name: weight for name, weight in weights.items() if name in used or name.startswith(decoder)}


def _shrink(settings: dict[str, Any], config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """What of a default configuration has to change."""
    changes: dict[str, Any] = {}
    for name, value in settings.items():
        if name in config_class.sub_configs and isinstance(value, dict) and value.get("model_type") in CONFIG_MAPPING:
            changes[name] = _shrink(value, CONFIG_MAPPING[value["model_type"]])
        elif (smaller := _smaller(name, value)) != value:
            changes[name] = smaller
    changes |= _fewer_layers(settings)
    special = {"eos_token_id": EOS_TOKEN_ID, "is_decoder": True, "use_sliding_window": True}
    changes |= {name: value for name, value in special.items() if name in settings}
    changes |= {name: UNK_TOKEN_ID for name, value in settings.items() if _is_absent_token(name, value)}
    for name, value in (("head_dim", 16), ("num_key_value_heads", 2), ("sliding_window", WINDOW)):
        if name in settings and not settings[name]:
            changes[name] = value
    if "kv_lora_rank" in settings:  # its keys and values are made for every head
        changes["num_key_value_heads"] = 4
    if "use_sliding_window" in settings and "layer_types" in settings:
        changes["layer_types"] = ["full_attention", "sliding_attention"]
    return changes | _SPECIAL.get(config_class.model_type, {})


def _smaller(name: str, value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool) or _NOT_SIZES.search(name):
        return value
    return min([value, *(limit for pattern, limit in _SIZES if re.search(pattern, name))][:2])


def _is_absent_token(name: str, value: object) -> bool:
    return name in ("bos_token_id", "pad_token_id") and isinstance(value, int) and value >= VOCABULARY_SIZE


def _fewer_layers(settings: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind, where a configuration names kinds layer by layer."""
    count = next((settings[name] for name in _LAYER_COUNTS if isinstance(settings.get(name), int)), None)
    lists = {name: v for name, v in settings.items() if isinstance(v, list) and count and len(v) == count > 4}
    if not lists:
        return {}
    kinds: dict[tuple[Any, ...], int] = {}
    for index, kind in enumerate(zip(*lists.values(), strict=True)):
        kinds.setdefault(tuple(map(str, kind)), index)
    chosen = sorted(kinds.values())[:_MOST_LAYERS]
    if len(chosen) < 2:
        chosen = [0, 1]
    counts = {name: len(chosen) for name in _LAYER_COUNTS if settings.get(name) == count}
    return counts | {name: [_smaller(name, values[index]) for index in chosen] for name, values in lists.items()}


@torch.no_grad()
def _scale_weights(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draws every weight afresh, so that layers, not the last token's embedding, decide the output."""
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.add_(noise, alpha=0.1)
        elif re.search(r"embed|wte|wpe", name):
            parameter.copy_(noise)
        else:
            parameter.copy_(noise * (1.5 / max(parameter.shape[-2:]) ** 0.5))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:200]
