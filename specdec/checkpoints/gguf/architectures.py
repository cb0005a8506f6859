"""Make the content of config.json from a GGUF file's metadata, or refuse the file by the key that it cannot state.

Every key of the architecture sets a field, has the value that the model has anyway, or is refused by its name and
value. Keys that a file leaves out have the values that llama.cpp gives them. Needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.checkpoints.counts import MOST_LAYERS, is_count
from specdec.checkpoints.gguf.description import REQUIRED, Architecture, Number, sizes_of
from specdec.checkpoints.gguf.file import GgufFile
from specdec.checkpoints.gguf.numbers import ModelNumbers
from specdec.checkpoints.gguf.rope import rope_fields
from specdec.checkpoints.gguf.table import ARCHITECTURES, architecture_of
from specdec.contract.errors import InvalidRequest, Unsupported

_TOKEN_KEYS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_FULL, _SLIDING = "full_attention", "sliding_attention"


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the content of config.json.

    Raises:
        InvalidRequest: a key that every file of the architecture has is missing, or a value is impossible.
        Unsupported: the architecture is unknown, or transformers' type of model cannot have a number of the file; the
            message has its key and value.
    """
    architecture = known_architecture(file)
    numbers = ModelNumbers(file, architecture.model_type)
    own = architecture.by_layer.fields(file, numbers) if architecture.by_layer else {}
    config = own | _sizes(file, architecture, numbers)
    sizes = sizes_of(config)
    for key, number in architecture.numbers.items():
        config[number.field] = _value(numbers, key, number, sizes)
    for key in architecture.unused:
        numbers.take(key)
    numbers.require("expert_weights_norm", architecture.constants.get("norm_topk_prob", True))
    config |= _epsilon(architecture, numbers) | _windows(architecture, numbers, config)
    if architecture.rope is not None:
        context = config["max_position_embeddings"]
        config |= rope_fields(file, numbers, architecture.rope, sizes["D"], context)
    if (num_layers := architecture.num_layers_scaled_by_width) is not None:
        share = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = share if config["num_hidden_layers"] == num_layers else sizes["D"]
    numbers.require_none_left()
    return config | dict(architecture.constants) | _flags(file, architecture) | _tokens(file, config["vocab_size"])


def known_architecture(file: GgufFile) -> Architecture:
    """Return the architecture of a file. Raises Unsupported: it is unknown, or the file holds no language model."""
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise Unsupported(f"model {str(file.path)!r} holds no model but is of type {str(kind)[:64]!r}", field="model")
    if file.of_model("attention.causal") is False:
        raise Unsupported(
            f"model {str(file.path)!r} is an encoder and not a decoder-only language model: "
            f"{file.architecture}.attention.causal = False",
            field="model",
        )
    architecture = architecture_of(file.architecture, file.metadata)
    if architecture is None:
        raise Unsupported(
            f"model {str(file.path)!r} holds a model of an unsupported type: {file.architecture[:64]}; supported are "
            f"{', '.join(sorted(ARCHITECTURES))}. Serve "
            f"{'its checkpoint in safetensors files' if file.is_recurrent else 'it with --backend llama-cpp'}",
            field="model",
        )
    return architecture


def _sizes(file: GgufFile, architecture: Architecture, numbers: ModelNumbers) -> dict[str, Any]:
    """Return the fields that all types of models have."""
    hidden, heads = numbers.count("embedding_length"), numbers.count("attention.head_count")
    kv_heads = numbers.count("attention.head_count_kv", heads)
    numbers.require("embedding_length_out", hidden)
    has_experts = "expert_count" in architecture.numbers  # such a file may leave out the width of an MLP that it lacks
    config = {
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        architecture.mlp_field: numbers.count("feed_forward_length", 0 if has_experts else None, least=0),
        "num_hidden_layers": numbers.count("block_count", most=MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": numbers.count("context_length"),
        "vocab_size": _vocabulary_size(file, numbers),
        "tie_word_embeddings": _HEAD not in file.tensors,
    }
    share = hidden // heads
    if architecture.has_head_dim:
        config["head_dim"] = share = numbers.count("attention.key_length", share, least=0)
    _require_heads(file, heads, kv_heads, share)
    for key in ("attention.key_length", "attention.value_length"):
        numbers.require(key, share)
        numbers.require(f"{key}_swa", share)
    return config


def _require_heads(file: GgufFile, heads: int, kv_heads: int, width: int) -> None:
    if heads % kv_heads or width < 1 or width % 2:
        raise InvalidRequest(
            f"model {str(file.path)!r} has {heads} heads of width {width} and {kv_heads} heads of keys; the width must "
            "be even, and the second number a divisor of the first: convert or download it again",
            field="model",
        )


def _vocabulary_size(file: GgufFile, numbers: ModelNumbers) -> int:
    tensor = file.tensors.get(_EMBEDDING)
    if tensor is None or len(tensor.shape) != 2:
        raise InvalidRequest(
            f"model {str(file.path)!r} holds no language model: it lacks the matrix {_EMBEDDING}", field="model"
        )
    numbers.require("vocab_size", tensor.shape[0])
    return tensor.shape[0]


def _value(numbers: ModelNumbers, key: str, number: Number, sizes: Mapping[str, int]) -> Any:
    """Return the value of a field."""
    default = None if number.default is REQUIRED else number.default
    if key in numbers or number.default is REQUIRED:
        value = numbers.count(key, least=0) if number.is_count else numbers.real(key)
        if value:
            return value
        default = number.zero
    return default(sizes) if callable(default) else default


def _epsilon(architecture: Architecture, numbers: ModelNumbers) -> dict[str, Any]:
    key, field = architecture.epsilon
    epsilon = numbers.real(key)
    if epsilon < 0:
        numbers.refuse(key, epsilon)
    for other in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
        numbers.require(other, epsilon)  # converters may write both
    return {field: epsilon}


def _windows(architecture: Architecture, numbers: ModelNumbers, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that say within which windows layers attend."""
    window, context = architecture.window, config["max_position_embeddings"]
    size = numbers.count("attention.sliding_window", (window and window.default) or 0, least=0)
    pattern = numbers.take("attention.sliding_window_pattern", window and window.period)
    if window is None:
        if 0 < size < context:
            numbers.refuse("attention.sliding_window", size)
        return {}
    if window.period is None:
        if size and pattern is not None:
            numbers.refuse("attention.sliding_window_pattern", pattern)
        return {"sliding_window": size or None}
    num_layers = config["num_hidden_layers"]
    slides = _slides(numbers, pattern, num_layers) if size else [False] * num_layers
    return {
        "sliding_window": size or (context if window.is_required_by_layers else None),
        "layer_types": [_SLIDING if slide else _FULL for slide in slides],
    }


def _slides(numbers: ModelNumbers, pattern: Any, num_layers: int) -> list[bool]:
    """Return for each layer whether it has a window: all but each last of a period, or as a list says."""
    if isinstance(pattern, list) and len(pattern) == num_layers:
        return [bool(slides) for slides in pattern]
    if isinstance(pattern, (list, bool)) or not isinstance(pattern, int):
        numbers.refuse("attention.sliding_window_pattern", pattern, f"for {num_layers} layers")
    return [not pattern or index % pattern < pattern - 1 for index in range(num_layers)]


def _flags(file: GgufFile, architecture: Architecture) -> dict[str, bool]:
    """Return the fields that say which biases there are."""
    present = file.tensors.keys()
    return {
        field: bool({f"blk.0.{tensors[0]}.bias", "blk.0.attn_qkv.bias" * (tensors[0] == "attn_q")} & present)
        for field, tensors in architecture.biases.items()
        if field
    }


def _tokens(file: GgufFile, num_tokens: int) -> dict[str, int | None]:
    """Return special tokens, so that the defaults of transformers' classes, which are other models', do not apply."""
    named = {field: file.metadata.get(f"tokenizer.ggml.{key}") for field, key in _TOKEN_KEYS.items()}
    return {field: token if is_count(token, 0, num_tokens - 1) else None for field, token in named.items()}
