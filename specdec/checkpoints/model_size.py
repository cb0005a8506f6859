"""Size of a model from its small files or a GGUF header: parameters, layers, memory of its KV cache. Reads no weights.

`specdec advise` compares a target with possible drafts by these numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from specdec.checkpoints.locate import locate_checkpoint
from specdec.checkpoints.preflight import read_sizes

_MAX_HEADER_BYTES = 100_000_000

#: Bytes of a number in the KV cache where nothing else is configured: bfloat16 and float16.
_KV_NUMBER_BYTES = 2


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers that decide the memory and the speed of a model."""

    num_parameters: int
    is_estimate: bool
    """True if the parameters were derived from the configuration, because the weights are not on this machine."""
    num_layers: int
    kv_bytes_per_token: int
    """Bytes of KV cache per token, with numbers of two bytes."""
    num_mtp_layers: int
    """Number of multi-token-prediction layers in the checkpoint."""


def model_size(model: str) -> ModelSize:
    """Return the size of a checkpoint.

    Args:
        model: directory, GGUF file or hub id; only the small files of a hub id are downloaded.

    Raises:
        InvalidRequest: the checkpoint does not exist, or its config.json or GGUF header is unreadable.
        Unsupported: a GGUF file holds an encoder.
    """
    text = read_sizes(model)
    num_layers, width = _count(text, "num_hidden_layers"), _count(text, "hidden_size")
    heads = max(1, _count(text, "num_attention_heads"))
    kv_heads = _count(text, "num_key_value_heads") or heads
    head_dim = _count(text, "head_dim") or width // heads
    counted = text.get("num_weights") or _counted_parameters(locate_checkpoint(model, small_files_only=True))
    return ModelSize(
        counted or _estimated_parameters(text, num_layers, width, heads, kv_heads, head_dim),
        counted == 0,
        num_layers,
        2 * _KV_NUMBER_BYTES * num_layers * kv_heads * head_dim,
        _count(text, "num_mtp_layers") or _count(text, "num_nextn_predict_layers"),
    )


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def _counted_parameters(directory: Path) -> int:
    """Return the number of weights in the safetensors files; 0 if there are none or one is unreadable."""
    num_weights = 0
    for path in directory.glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                num_bytes = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(num_bytes)) if num_bytes <= _MAX_HEADER_BYTES else {}
            shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
            num_weights += sum(map(prod, shapes))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return 0
    return num_weights


def _estimated_parameters(
    config: Mapping[str, Any], num_layers: int, width: int, heads: int, kv_heads: int, head_dim: int
) -> int:
    """Return the number of weights of a dense gated decoder with these dimensions, without norms and biases."""
    embeddings = _count(config, "vocab_size") * width * (1 if config.get("tie_word_embeddings") else 2)
    attention = 2 * width * heads * head_dim + 2 * width * kv_heads * head_dim
    experts = max(1, _count(config, "num_local_experts") or _count(config, "num_experts"))
    mlp = 3 * width * (_count(config, "moe_intermediate_size") or _count(config, "intermediate_size")) * experts
    return embeddings + num_layers * (attention + mlp)
