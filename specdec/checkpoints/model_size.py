"""Size of a model from its small files or a GGUF header: parameters, layers, memory of its KV cache. Reads no weights.

`specdec advise` compares a target with possible drafts by these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from specdec.checkpoints.counts import MOST, MOST_LAYERS, require_count
from specdec.checkpoints.gguf.file import GgufFile, is_gguf
from specdec.checkpoints.locate import locate_checkpoint
from specdec.checkpoints.preflight import read_config, read_sizes, reads_more_than_text
from specdec.checkpoints.quantised.statement import read_quantisation
from specdec.checkpoints.quantised.stored_weights import stored_weights
from specdec.checkpoints.recurrent_sizes import count_layers
from specdec.checkpoints.text_weights import is_text_weight
from specdec.checkpoints.weight_files import tensor_headers
from specdec.contract.errors import SpecdecError

#: Bytes of a number in the KV cache if nothing else is configured: bfloat16 and float16.
_KV_NUMBER_BYTES = 2

#: Least and greatest value of each size in a config.json.
_LIMITS = {
    "num_hidden_layers": (1, MOST_LAYERS),
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"), (1, MOST)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "num_local_experts", "num_experts"), (0, MOST)),
    **dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers"), (0, MOST_LAYERS)),
}


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
    state_bytes: int = 0
    """Bytes of one session's recurrent states in a hybrid; a session with a running call holds two of them."""
    hidden_size: int = 0
    """Width of the activations between layers."""


def model_size(model: str) -> ModelSize:
    """Return the size of a checkpoint.

    Args:
        model: directory, GGUF file or hub id; only the small files of a hub id are downloaded.

    Raises:
        InvalidRequest: the checkpoint does not exist, or its config.json or GGUF header is unreadable or states an
            impossible size.
        Unsupported: a GGUF file holds an encoder.
    """
    text = read_sizes(model)
    sizes = {
        name: require_count(model, name, text.get(name), least=least, most=most)
        for name, (least, most) in _LIMITS.items()
    }
    num_layers, width = sizes["num_hidden_layers"], sizes["hidden_size"]
    heads = sizes["num_attention_heads"] = sizes["num_attention_heads"] or 1
    kv_heads = sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or heads
    head_dim = sizes["head_dim"] = sizes["head_dim"] or width // heads
    layers = count_layers(model, text, num_layers)
    counted = _counted_parameters(Path(model).expanduser(), model)
    return ModelSize(
        counted or _estimated_parameters(sizes, is_tied=bool(text.get("tie_word_embeddings"))),
        counted == 0,
        layers.num_layers,
        2 * _KV_NUMBER_BYTES * layers.num_attention * kv_heads * head_dim,
        sizes["num_mtp_layers"] or sizes["num_nextn_predict_layers"],
        layers.state_bytes,
        width,
    )


def _counted_parameters(path: Path, model: str) -> int:
    """Return the number of weights in the files of a model; 0 if there are none or one is unreadable.

    Of a model that reads more than text, the weights of the text half are counted.
    """
    if is_gguf(path):
        return GgufFile(path).num_weights
    directory = locate_checkpoint(model, small_files_only=True)
    config = read_config(model, directory)
    text_only = reads_more_than_text(config)
    try:
        headers = tensor_headers(model, directory, text_only=text_only)
        quantisation = read_quantisation(model, config.get("quantization_config"))
        quantised = {} if quantisation is None else stored_weights(model, quantisation, headers)
    except SpecdecError:
        return 0
    shapes = {name: header.shape for name, header in headers.items() if header.dtype.startswith(("F", "BF"))}
    for weight in quantised.values():
        for tensor in weight.tensors:
            shapes.pop(tensor, None)
    shapes |= {name: weight.shape for name, weight in quantised.items()}
    return sum(prod(shape) for name, shape in shapes.items() if not text_only or is_text_weight(name))


def _estimated_parameters(sizes: Mapping[str, int], *, is_tied: bool) -> int:
    """Return the number of weights of a dense gated decoder with these sizes, without norms and biases."""
    width, head_dim = sizes["hidden_size"], sizes["head_dim"]
    embeddings = sizes["vocab_size"] * width * (1 if is_tied else 2)
    attention = 2 * width * (sizes["num_attention_heads"] + sizes["num_key_value_heads"]) * head_dim
    experts = max(1, sizes["num_local_experts"] or sizes["num_experts"])
    mlp = 3 * width * (sizes["moe_intermediate_size"] or sizes["intermediate_size"]) * experts
    return embeddings + sizes["num_hidden_layers"] * (attention + mlp)
