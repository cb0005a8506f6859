"""Check from a checkpoint's small files whether it can be served, before anything is loaded.

These checks read JSON, tokenizers and the headers of weight files, and import no torch. `specdec.engine.loader` checks
the loaded model and may still refuse a checkpoint that passes here. Called by `specdec up` and when a replica starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdec.checkpoints.gguf.file import is_gguf
from specdec.checkpoints.locate import locate_checkpoint
from specdec.checkpoints.quantised.statement import read_quantisation
from specdec.checkpoints.quantised.stored_weights import require_plain, stored_weights
from specdec.checkpoints.transformers_tables import default_sizes, known_types
from specdec.checkpoints.weight_files import require_whole_weights, tensor_headers
from specdec.contract.errors import InvalidRequest, SpecdecError, Unsupported
from specdec.contract.types import BLOCK_TOKENS

#: Least number of bytes in which a KV cache stores a number.
_LEAST_KV_NUMBER_BYTES = 2


def require_servable(model: str, *, flag: str) -> None:
    """Check a checkpoint's configuration and that it has a tokenizer and complete weight files.

    Args:
        model: a checkpoint directory, a GGUF file or a hub id. Of a hub id only the small files are downloaded.
        flag: command-line flag that named the model; error messages begin with it.

    Raises:
        InvalidRequest: the checkpoint does not exist, or one of its files is missing, unreadable or incomplete.
        Unsupported: its type is not a known decoder-only language model, or its quantisation is not supported.
    """
    with naming_flag(flag):
        path = Path(model).expanduser()
        if is_gguf(path):
            locate_checkpoint(model)  # checks all of it
            return
        directory = locate_checkpoint(model, small_files_only=True)
        config = read_config(model, directory)
        require_decoder_only(model, config)
        quantisation = read_quantisation(model, config.get("quantization_config"))
        if not (directory / "tokenizer.json").is_file():
            raise InvalidRequest(f"model {model!r} has no tokenizer.json", field="model")
        # The weights of a hub id are downloaded later.
        if path.is_dir():
            if not _has_weights(directory):
                raise InvalidRequest(f"model {model!r} has no weights (*.safetensors)", field="model")
            text_only = reads_more_than_text(config)
            require_whole_weights(model, directory, text_only=text_only)
            headers = tensor_headers(model, directory, text_only=text_only)
            if quantisation is None:
                require_plain(model, headers)
            else:
                stored_weights(model, quantisation, headers)


def require_kv_room(model: str, kv_cache_bytes: int, *, num_ranks: int, flag: str) -> None:
    """Check that a KV cache holds at least one block.

    Args:
        model: a model that passed `require_servable`.
        kv_cache_bytes: size of the cache on each rank.
        num_ranks: number of ranks that divide the KV heads among them.
        flag: command-line flag that gave `kv_cache_bytes`.

    Raises:
        InvalidRequest: the cache is too small for one block in any dtype.
    """
    text = read_sizes(model)
    layers, heads, kv_heads, head_dim, width = (
        number if isinstance(number := text.get(name), int) and number > 0 else 0
        for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    )
    if not (layers and heads and (head_dim or width)) or text.get("kv_lora_rank"):  # the loader checks these
        return
    kv_heads, head_dim = kv_heads or heads, head_dim or width // heads
    least = 2 * _LEAST_KV_NUMBER_BYTES * BLOCK_TOKENS * layers * -(-kv_heads // num_ranks) * head_dim
    if kv_cache_bytes < least:
        raise InvalidRequest(
            f"{flag} must be at least {least}, one block of {BLOCK_TOKENS} tokens of {model!r}; got {kv_cache_bytes}",
            field="kv_cache_bytes",
        )


@contextmanager
def naming_flag(flag: str) -> Iterator[None]:
    """Put the flag that named a model in front of the messages of errors about it."""
    try:
        yield
    except SpecdecError as error:
        raise type(error)(f"{flag}: {error.message}", reason=error.reason, field=error.field) from error


def read_config(model: str, directory: Path) -> Mapping[str, Any]:
    """Return a checkpoint's config.json. Raise InvalidRequest if it is missing, unreadable or has no `model_type`."""
    path = directory / "config.json"
    if not path.is_file():
        raise InvalidRequest(f"model {model!r} has no config.json", field="model")
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"model {model!r} has an unreadable config.json: {error}", field="model") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise InvalidRequest(f"model {model!r} has a config.json that has no model_type", field="model")
    return config


def model_config(model: str) -> Mapping[str, Any]:
    """Return a model's config.json; that of a GGUF file is made from its header. Raises as `read_sizes`."""
    is_file = is_gguf(Path(model).expanduser())
    return read_config(model, locate_checkpoint(model, small_files_only=not is_file))


def read_sizes(model: str) -> Mapping[str, Any]:
    """Return the part of a model's config.json that has its sizes.

    Raises:
        InvalidRequest: as `read_config`; or the checkpoint does not exist.
        Unsupported: a GGUF file holds a model that only other engines can run.
    """
    config = model_config(model)
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    tied = {"tie_word_embeddings": config.get("tie_word_embeddings")}
    # Nested configurations often state only what differs from their type's defaults.
    return {**default_sizes(str(text.get("model_type"))), **tied, **text}


def require_decoder_only(model: str, config: Mapping[str, Any]) -> None:
    """Raise Unsupported if a configuration is not that of a decoder-only language model."""
    types = known_types()
    kind = config["model_type"][:64]
    if types is None:  # the loader checks the type
        return
    if kind not in types.causal | types.image | types.multimodal:
        if "auto_map" in config:
            raise Unsupported(f"model {model!r} needs custom code, which is never run")
        raise Unsupported(f"model {model!r} is of type {kind}, which is not a supported decoder-only language model")
    # A type in both tables is an encoder unless its configuration says `is_decoder`.
    is_encoder = kind in types.masked and not config.get("is_decoder")
    if is_encoder or config.get("is_encoder_decoder"):
        raise Unsupported(
            f"model {model!r} is of type {kind}, which is an encoder and not a decoder-only language model"
        )


def reads_more_than_text(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is of a model of which only the text half is served."""
    types = known_types()
    return types is not None and config["model_type"] in types.image | types.multimodal


def _has_weights(directory: Path) -> bool:
    return any(next(directory.glob(pattern), None) for pattern in ("*.safetensors", "*.bin"))
