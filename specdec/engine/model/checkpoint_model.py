"""What a checkpoint is before any of its weights are read, and what a worker made of it tells those above.

Its configuration, checked; the device and the arithmetic it is to run in; how long its sequences may be; how many KV
blocks it gets. Not here: weights (`engine.loader`, `engine.parallel`, which call this).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from specdec.checkpoints.locate import checkpoint_fingerprint, require_plain_weights
from specdec.checkpoints.vocabulary import vocabulary_fingerprint, vocabulary_size
from specdec.engine.base import KvLayout, ModelShape
from specdec.errors import InvalidRequest, Unsupported
from specdec.types import BLOCK_TOKENS

#: As what a model may be served; they are part of its fingerprint.
SERVED_DTYPES = ("float32", "bfloat16", "float16", "int8")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# A CPU pool by default holds this many sessions of this many tokens, within this many bytes.
_CPU_SESSIONS = 64
_CPU_SESSION_TOKENS = 2048
_CPU_POOL_BYTES = 1 << 30


def load_config(model: str, directory: Path) -> PreTrainedConfig:
    """Reads a checkpoint's configuration.

    Args:
        model: as it was named.
        directory: where it lies.

    Raises:
        InvalidRequest: there is none, or it is unreadable.
        Unsupported: not a decoder-only model, or one whose layers or quantised weights are not known here.
    """
    if not (directory / "config.json").is_file():
        raise InvalidRequest(f"model {model!r} has no config.json", field="model")
    try:
        # Never the checkpoint's own code; unset, transformers would ask on stdin.
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # a hostile config.json raises whatever its class happens to
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise Unsupported(f"model {model!r} needs code of its own, which is never run") from error
        raise InvalidRequest(
            f"model {model!r} has an unreadable config.json: {first_line(error)}", field="model"
        ) from error
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Unsupported(f"model {model!r} is of type {kind}, which is not a decoder-only language model")
    other_layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other_layers:
        layers = ", ".join(sorted(other_layers))
        raise Unsupported(f"model {model!r} is of type {kind} and has layers of type {layers}")
    if (quantisation := getattr(config, "quantization_config", None)) is not None:
        require_plain_weights(model, quantisation)
        quantisation["dequantize"] = True
    return config


def pick_device(name: str) -> torch.device:
    """What `--device` names. Raises InvalidRequest: it is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequest(f"device {name!r} is unknown", field="device") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device {name!r} is neither cpu nor cuda", field="device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidRequest(f"device {name!r} is not present on this machine", field="device")
    return device


def pick_dtype(name: str, device: torch.device, own: torch.dtype | None = None) -> torch.dtype | str:
    """What `--dtype` names, for transformers; of int8 it is what everything else is computed in.

    Args:
        name: as given.
        device: of the model.
        own: the checkpoint's; None: it does not say.

    Raises:
        InvalidRequest: the name is unknown.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name == "int8":
        # float16 has digits that bfloat16 would take from the weights before they are rounded.
        on_gpu = torch.float16 if own == torch.float16 else torch.bfloat16
        return torch.float32 if device.type == "cpu" else on_gpu
    if name not in _DTYPES:
        raise InvalidRequest(f"dtype {name!r} is none of auto, {', '.join(_DTYPES)}, int8", field="dtype")
    return _DTYPES[name]


def model_shape(
    model: PreTrainedModel,
    directory: Path,
    token_to_id: Mapping[str, int],
    num_blocks: int,
    context: int,
    device: torch.device,
    kv_layout: KvLayout,
    *,
    num_head_rows: int,
    is_int8: bool,
) -> ModelShape:
    """What the layers above a worker know of its model.

    Args:
        model: with its generation config.
        directory: the checkpoint's.
        token_to_id: its vocabulary.
        num_blocks: of the KV pool.
        context: longest sequence that is wanted.
        device: where it runs.
        kv_layout: of its blocks, or of this rank's part of them.
        num_head_rows: logits that the model gives a row, of all ranks together.
        is_int8: whether its layers' weights are rounded.
    """
    vocabulary = vocabulary_fingerprint(token_to_id)
    served_dtype = "int8" if is_int8 else str(model.dtype).removeprefix("torch.")
    return ModelShape(
        vocabulary_size=min(vocabulary_size(token_to_id), num_head_rows),
        max_context_tokens=min(context, num_blocks * BLOCK_TOKENS),
        eos_token_ids=_eos_token_ids(model),
        model_fingerprint=checkpoint_fingerprint(directory, vocabulary, served_dtype),
        vocabulary_fingerprint=vocabulary,
        num_kv_blocks=num_blocks,
        dtype=served_dtype,
        device=str(device),
        kv_layout=kv_layout,
    )


def require_all_weights(model: str, report: Mapping[str, Any]) -> None:
    """Refuses what was loaded with weights of nobody's.

    Args:
        model: as it was named.
        report: what transformers tells of the loading, sizes that do not match ignored.

    Raises:
        InvalidRequest: a tensor is missing, or has another shape than its configuration says; it is named.
    """
    if report["mismatched_keys"]:
        name, stored, needed = min(report["mismatched_keys"])
        raise InvalidRequest(
            f"model {model!r} cannot be loaded: {name} is {list(stored)}, and its configuration needs {list(needed)}",
            field="model",
        )
    if report["missing_keys"]:
        raise InvalidRequest(f"model {model!r} lacks weights, {min(report['missing_keys'])} for one", field="model")


def model_context(config: PreTrainedConfig) -> int:
    """Positions the model was made for."""
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if not context:
        raise Unsupported(f"a model of type {config.model_type} does not say how many positions it has")
    rope = getattr(text, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    # Their frequencies change with the longest sequence of the batch: beyond the original context one session's
    # length would change another's logits.
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return int(min(context, original or context))
    return int(context)


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def pool_blocks(bytes_per_block: int, context: int, kv_cache_bytes: int | None, num_kv_blocks: int | None) -> int:
    """Blocks of the KV pool: as many as are asked for, or else what a CPU's memory is good for.

    Raises:
        InvalidRequest: not one.
    """
    if num_kv_blocks is not None:
        blocks = num_kv_blocks
    elif kv_cache_bytes is not None:
        blocks = kv_cache_bytes // bytes_per_block
    else:
        wanted = _CPU_SESSIONS * -(-min(context, _CPU_SESSION_TOKENS) // BLOCK_TOKENS)
        # A model so wide that the cap holds no whole context still gets one.
        blocks = max(
            min(wanted, _CPU_POOL_BYTES // bytes_per_block), -(-min(context, _CPU_SESSION_TOKENS) // BLOCK_TOKENS)
        )
    if blocks < 1:
        raise InvalidRequest(
            f"the KV pool has no room for one block of {bytes_per_block} bytes", field="kv_cache_bytes"
        )
    return blocks


@contextmanager
def quietly() -> Iterator[None]:
    """Keeps transformers' progress bars and reports off stderr: what is wrong comes as one error."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    """The first line of what an error says, or what it is."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
