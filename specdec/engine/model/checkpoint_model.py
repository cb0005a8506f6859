"""Read a checkpoint's configuration and derive what is known before its weights are loaded.

That is the checked configuration, device and dtype, the longest sequence, and the description of the model for the
layers above the worker. Called by `engine.load_pipeline` and its users.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from specdec.checkpoints.generation_config import end_token_ids
from specdec.checkpoints.gguf.file import is_gguf
from specdec.checkpoints.locate import checkpoint_fingerprint
from specdec.checkpoints.quantised.statement import read_quantisation
from specdec.checkpoints.quantised.stored_weights import require_plain
from specdec.checkpoints.vocabulary import vocabulary_fingerprint, vocabulary_size
from specdec.checkpoints.weight_files import tensor_headers
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import KvLayout, ModelShape
from specdec.engine.model.dequantise import QuantisedReader
from specdec.engine.model.gguf_state import gguf_state
from specdec.engine.model.layer_probe import PROBE_NAME

#: Dtypes in which a model may be served; the dtype is part of its fingerprint.
SERVED_DTYPES = ("float32", "bfloat16", "float16", "int8")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_log = logging.getLogger(__name__)

#: Title of the progress bar that transformers moves once for each loaded weight.
_WEIGHTS_BAR = "Loading weights"


# Layers that recur, that recur and attend, that attend, or that do neither; `layer_probe` finds what they compute.
_RECURRENT_LAYER_TYPES = {"conv", "linear_attention", "hybrid"}
_LAYER_TYPES = _RECURRENT_LAYER_TYPES | {
    *("full_attention", "sliding_attention", "chunked_attention"),
    *("dense", "sparse", "mlp", "moe"),
}


def is_hybrid(config: PreTrainedConfig) -> bool:
    """Return whether a configuration states recurrent layers."""
    return not _RECURRENT_LAYER_TYPES.isdisjoint(getattr(config.get_text_config(), "layer_types", None) or ())


def load_config(model: str, directory: Path) -> PreTrainedConfig:
    """Read a checkpoint's configuration.

    Args:
        model: name that the user gave.
        directory: directory of the checkpoint.

    Raises:
        InvalidRequest: the configuration is missing or unreadable.
        Unsupported: the model is not decoder-only, or its layers or quantised weights are not supported.
    """
    if not (directory / "config.json").is_file():
        raise InvalidRequest(f"model {model!r} has no config.json", field="model")
    try:
        # A checkpoint's own code is never run. Without this argument transformers would ask on stdin.
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # a hostile config.json may raise any error
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise Unsupported(f"model {model!r} needs code of its own, which is never run") from error
        raise InvalidRequest(
            f"model {model!r} has an unreadable config.json: {first_line(error)}", field="model"
        ) from error
    kind = config.model_type
    is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or has_other_half(config)
    if getattr(config, "is_encoder_decoder", False) or not is_known:
        raise Unsupported(f"model {model!r} is of type {kind}, which is not a decoder-only language model")
    text = config.get_text_config()
    if getattr(text, "is_encoder_decoder", False):
        raise Unsupported(f"model {model!r} is of type {kind}, whose text model {text.model_type} has an encoder")
    layer_types = getattr(text, "layer_types", None) or ()
    if other_layers := set(layer_types) - _LAYER_TYPES:
        layers = ", ".join(sorted(other_layers))
        raise Unsupported(f"model {model!r} is of type {kind} and has layers of type {layers}")
    _drop_absent_padding(config)
    read_quantisation(model, getattr(config, "quantization_config", None))
    return _text_alone(config)


def _text_alone(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the nested text configuration if its own class reads the weights of the whole checkpoint, else `config`.

    Transformers has a change of prefixes for such a class, which needs no packages for images.
    """
    text = config.get_text_config()
    conversions = get_checkpoint_conversion_mapping(text.model_type) or ()
    is_alone = any(isinstance(conversion, PrefixChange) for conversion in conversions)
    if text is config or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING or not is_alone:
        return config
    for name in ("eos_token_id", "quantization_config"):
        if getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    if getattr(config, "tie_word_embeddings", False):  # then the files have no head
        text.tie_word_embeddings = True
    return text


def has_other_half(config: PreTrainedConfig) -> bool:
    """Return whether a configuration is of a model that reads more than text, such as images."""
    return type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING


def _drop_absent_padding(config: PreTrainedConfig) -> None:
    """Remove a padding token that the vocabulary does not have: it pads nothing here, and embeddings refuse it."""
    text = config.get_text_config()
    padding, num_tokens = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    if isinstance(padding, int) and isinstance(num_tokens, int) and padding >= num_tokens:
        _log.warning("ignoring a padding token that the vocabulary of %d tokens does not have: %d", num_tokens, padding)
        text.pad_token_id = None


def pick_device(name: str) -> torch.device:
    """Return the device that `--device` names. Raises InvalidRequest: this machine does not have it."""
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
    """Return the dtype that `--dtype` names, for transformers; for int8 the dtype of everything that is not int8.

    Args:
        name: value of the flag.
        device: device of the model.
        own: dtype of the checkpoint; None if its configuration has none.

    Raises:
        InvalidRequest: the name is unknown.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name == "int8":
        # bfloat16 would drop digits of float16 weights before they are rounded to int8.
        on_gpu = torch.float16 if own == torch.float16 else torch.bfloat16
        return torch.float32 if device.type == "cpu" else on_gpu
    if name not in _DTYPES:
        raise InvalidRequest(f"dtype {name!r} is unknown; use auto, {', '.join(_DTYPES)} or int8", field="dtype")
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
    """Return the description of a model for the layers above its worker.

    Args:
        model: the loaded model.
        directory: directory of the checkpoint.
        token_to_id: vocabulary of the checkpoint.
        num_blocks: blocks of the KV pool.
        context: longest sequence to serve.
        device: device of the model.
        kv_layout: layout of the blocks, or of this rank's part of them.
        num_head_rows: logits per row, of all ranks together.
        is_int8: whether the layers' weights are rounded to int8.
    """
    vocabulary = vocabulary_fingerprint(token_to_id)
    num_tokens = min(vocabulary_size(token_to_id), num_head_rows)
    ends = getattr(model.config, "eos_token_id", None)
    if ends is None:
        ends = getattr(model.config.get_text_config(), "eos_token_id", None)
    served_dtype = "int8" if is_int8 else str(model.dtype).removeprefix("torch.")
    return ModelShape(
        vocabulary_size=num_tokens,
        max_context_tokens=min(context, num_blocks * BLOCK_TOKENS),
        eos_token_ids=end_token_ids(directory, num_tokens, ends),
        model_fingerprint=checkpoint_fingerprint(directory, vocabulary, served_dtype),
        vocabulary_fingerprint=vocabulary,
        num_kv_blocks=num_blocks,
        dtype=served_dtype,
        device=str(device),
        kv_layout=kv_layout,
    )


def load_weights(
    name: str, kind: type[PreTrainedModel | AutoModelForCausalLM], directory: Path | None, **options: Any
) -> PreTrainedModel:
    """Let transformers load a model's weights, with the probe as its attention.

    Args:
        name: name of the model that the user gave.
        kind: class whose `from_pretrained` loads it.
        directory: directory of the checkpoint; None if `options` hold the weights (`state_dict`). The weights of a GGUF
            file are read from the file.
        options: further arguments of `from_pretrained`: `config`, and others such as `dtype`.

    Raises:
        InvalidRequest: the checkpoint is damaged, or not every weight came from it.
        Unsupported: its weights are quantised in a way that is not read, or as `gguf_state`.
    """
    with reading(name, kind, directory, options.pop("config")) as from_pretrained:
        try:
            with quietly():
                # With `output_loading_info` the call returns a pair, which its annotation does not say.
                loaded, report = cast(tuple[PreTrainedModel, dict[str, Any]], from_pretrained(
                    output_loading_info=True,
                    generation_config=GenerationConfig(),  # transformers fails on some values of the file
                    **{"attn_implementation": PROBE_NAME} | options,
                ))  # fmt: skip
        except Exception as error:  # safetensors and transformers raise many kinds for a damaged checkpoint
            raise InvalidRequest(f"model {name!r} cannot be loaded: {first_line(error)}", field="model") from error
    _require_all_weights(name, report)
    loaded.eval()
    return loaded


@contextmanager
def reading(
    name: str, kind: type[PreTrainedModel | AutoModelForCausalLM], directory: Path | None, config: PreTrainedConfig
) -> Iterator[Callable[..., PreTrainedModel]]:
    """Yield `kind.from_pretrained` for a checkpoint; quantised weights are computed while it reads, within the block.

    Arguments and errors are those of `load_weights`.
    """
    if directory is not None and is_gguf(path := Path(name).expanduser()):
        yield _from_state(kind, config, gguf_state(path))
        return
    quantisation = read_quantisation(name, getattr(config, "quantization_config", None))
    if quantisation is None or directory is None:
        if directory is not None:
            require_plain(name, tensor_headers(name, directory))
        yield partial(kind.from_pretrained, cast(Path, directory), config=config)
        return
    if hasattr(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__], Conv1D.__name__):
        raise Unsupported(
            f"model {name!r} is of type {config.model_type}, whose quantised weights are not read: its layers hold "
            "them transposed"
        )
    with QuantisedReader(name, directory, quantisation) as reader:
        yield _from_state(kind, without_quantisation(config), reader.parts())


def without_quantisation(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a configuration for the weights as `QuantisedReader` returns them."""
    plain = copy.deepcopy(config)
    del plain.quantization_config
    return plain


def _from_state(
    kind: type[PreTrainedModel | AutoModelForCausalLM], config: PreTrainedConfig, state: Mapping[str, Any]
) -> Callable[..., PreTrainedModel]:
    if kind is AutoModelForCausalLM:  # which wants a directory
        kind = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    return partial(kind.from_pretrained, cast(Path, None), config=config, state_dict=state)


def _require_all_weights(model: str, report: Mapping[str, Any]) -> None:
    """Check that every weight came from the checkpoint: transformers fills missing ones with random numbers.

    Args:
        model: name that the user gave.
        report: transformers' loading report, with mismatched sizes ignored.

    Raises:
        InvalidRequest: a tensor is missing or has another shape than the configuration says; the message names it.
    """
    if report["mismatched_keys"]:
        name, stored, needed = min(report["mismatched_keys"])
        raise InvalidRequest(
            f"model {model!r} cannot be loaded: tensor {name} has shape {list(stored)}, and its configuration needs "
            f"{list(needed)}",
            field="model",
        )
    if report["missing_keys"]:
        raise InvalidRequest(
            f"model {model!r} lacks the weight {min(report['missing_keys'])} ({len(report['missing_keys'])} in all)",
            field="model",
        )


def model_context(config: PreTrainedConfig) -> int:
    """Return the longest sequence that a configuration allows. Raises Unsupported: it does not say."""
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if not context:
        raise Unsupported(f"the configuration of a model of type {config.model_type} has no number of positions")
    return int(context)


@contextmanager
def quietly() -> Iterator[None]:
    """Keep transformers' progress bars and reports off stderr; failures are reported as one error."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def telling_progress(note_loaded: Callable[[float], None]) -> Iterator[None]:
    """Call `note_loaded` with the share of the weights that transformers has loaded, whenever it rises."""

    def watch(make_bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        bar = make_bar(*args, **options)
        return _told(bar, len(args[0]), note_loaded) if options.get("desc") == _WEIGHTS_BAR else bar

    before = transformers_logging.set_tqdm_hook(watch)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def _told(parts: Iterable[Any], num_parts: int, note_loaded: Callable[[float], None]) -> Iterator[Any]:
    for index, part in enumerate(parts):
        yield part
        note_loaded((index + 1) / num_parts)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
