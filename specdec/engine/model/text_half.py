"""Make transformers' class of a checkpoint and load its weights: of a model that also reads images, its text half.

Transformers' class of such a checkpoint is made without its other modules: the decoder, the embedding table and the
head remain, with the class's own forward pass and its own names of weights. The text is therefore that of `generate()`
for prompts of text, and there is no table of families. Tensors of other modules are never read, and files that hold
nothing else need not exist. Called by `engine.loader` and `engine.parallel.rank_loader`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

from specdec.checkpoints.quantised.statement import Quantisation, read_quantisation
from specdec.checkpoints.quantised.stored_weights import require_plain
from specdec.checkpoints.weight_files import safetensors_files, tensor_headers
from specdec.contract.errors import Unsupported
from specdec.engine.model.checkpoint_model import has_other_half, is_hybrid, load_weights, quietly, without_quantisation
from specdec.engine.model.dequantise import QuantisedReader
from specdec.engine.model.layer_probe import PROBE_NAME, refusing_failures


def require_own_attention(name: str, config: PreTrainedConfig) -> None:
    """Refuse a model that ignores the setting of its attention, because its own would run without the KV cache.

    Raises:
        Unsupported: the class of the decoder does not take another attention.
    """
    if config.get_text_config() is config:
        kinds = MODEL_FOR_MULTIMODAL_LM_MAPPING if has_other_half(config) else MODEL_FOR_CAUSAL_LM_MAPPING
        decoder: Any = kinds[type(config)]
    else:
        with refusing_failures(config), quietly():
            decoder = make_whole(config).get_decoder()
    # Many hybrids attend by the interface and do not say so in the first of these.
    can_replace = getattr(decoder, "_supports_attention_backend", False)
    if not (can_replace or (is_hybrid(config) and decoder._can_set_attn_implementation())):
        raise Unsupported(f"model {name!r} is of type {config.model_type}, whose attention cannot be replaced")


def make_whole(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model without weights, for its shape."""
    with torch.device("meta"):
        if has_other_half(config):
            kind, attention = _text_half_class(config), _text_attention(config)
            return cast(PreTrainedModel, kind._from_config(config, attn_implementation=attention))
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=PROBE_NAME)
    return model


def read_model(
    name: str, directory: Path, config: PreTrainedConfig, dtype: torch.dtype | str, **options: Any
) -> PreTrainedModel:
    """Return a model with its weights.

    Args:
        name: name of the model that the user gave.
        directory: directory of the checkpoint.
        config: its configuration.
        dtype: as `pick_dtype` returns it.
        options: further arguments of `from_pretrained`.

    Raises:
        InvalidRequest: as `load_weights`.
    """
    options |= {"config": config, "dtype": dtype, "ignore_mismatched_sizes": True}
    if not has_other_half(config):
        return load_weights(name, AutoModelForCausalLM, directory, trust_remote_code=False, **options)
    kind, options["attn_implementation"] = _text_half_class(config), _text_attention(config)
    quantisation = read_quantisation(name, getattr(config, "quantization_config", None))
    if quantisation is not None:
        options["config"] = without_quantisation(config)
    with _stored_tensors(name, directory, quantisation) as tensors:
        if tensors:
            half = load_weights(name, kind, None, state_dict=tensors, **options)
        else:  # the files have PyTorch's own format
            half = load_weights(name, kind, directory, **options)
    for _, module, parameter in _own_parameters(half):
        module._parameters[parameter] = None
    if quantisation is None:
        half.config.name_or_path = str(directory)  # heads of the checkpoint are read from there
    return half


@contextmanager
def _stored_tensors(name: str, directory: Path, quantisation: Quantisation | None) -> Iterator[dict[str, Any]]:
    """Yield the tensors of the safetensors files that exist, by their names; each is read when it is indexed."""
    if quantisation is not None:
        with QuantisedReader(name, directory, quantisation, text_only=True) as reader:
            yield reader.parts()
        return
    require_plain(name, tensor_headers(name, directory, text_only=True))
    with ExitStack() as files:
        tensors: dict[str, Any] = {}
        for path in safetensors_files(name, directory):
            if path.is_file():
                file = files.enter_context(safe_open(path, framework="pt"))
                tensors |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        yield tensors


def _text_half_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' class of a configuration, changed so that its models have only the text half."""
    whole = cast(type[PreTrainedModel], MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)])

    def make(model: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        whole.__init__(model, *arguments, **options)
        _drop_other_half(model)

    def set_quietly(model: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        with quietly():  # it warns of configurations without modules
            whole.set_attn_implementation(model, *arguments, **options)

    # Transformers finds the conversion of a checkpoint's weights by the name and the module of the class.
    changes = {"__init__": make, "set_attn_implementation": set_quietly, "__module__": whole.__module__}
    return type(whole.__name__, (whole,), changes)


def _other_configs(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """Return the nested configurations, by name, that neither are nor contain that of the text."""
    nested = {name: getattr(config, name, None) for name in config.sub_configs}
    text = config.get_text_config()
    return {
        name: part
        for name, part in nested.items()
        if isinstance(part, PreTrainedConfig) and part is not text and part.get_text_config() is part
    }


def _text_attention(config: PreTrainedConfig) -> dict[str, str]:
    """Return the setting that makes the probe the attention of the text model alone: others may not know its name."""
    others = _other_configs(config)
    return {name: "eager" if name in others else PROBE_NAME for name in ("", *config.sub_configs)}


def _drop_other_half(model: PreTrainedModel) -> None:
    """Remove all modules of a model except its decoder, its embedding table and its head."""
    others = {type(other) for other in _other_configs(model.config).values()}
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    _drop_all_but({module for part in parts if part is not None for module in _text_modules(part, others)}, model)
    left = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = model.all_tied_weights_keys
    model.all_tied_weights_keys = {name: source for name, source in tied.items() if {name, source} <= left}
    names = [f"{path}.{name}".removeprefix(".") for path, _, name in _own_parameters(model)]
    model._keys_to_ignore_on_load_missing = {f"^{re.escape(name)}$" for name in names}


def _text_modules(part: nn.Module, others: set[type]) -> Iterator[nn.Module]:
    """Yield the modules of a part except models with a configuration of one of the types `others`."""
    yield part
    for child in part.children():
        if type(getattr(child, "config", None)) not in others or not isinstance(child, PreTrainedModel):
            yield from _text_modules(child, others)


def _drop_all_but(kept: set[nn.Module], module: nn.Module) -> None:
    """Remove the modules that neither are nor contain one of `kept`."""
    for name, child in list(module.named_children()):
        if kept.isdisjoint(child.modules()):
            module._modules[name] = None
        else:
            _drop_all_but(kept, child)


def _own_parameters(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, module and name of the parameters outside of the parts that `_drop_other_half` keeps."""
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    text = {module for part in parts if part is not None for module in part.modules()}
    for path, module in model.named_modules():
        if module not in text:
            yield from ((path, module, name) for name, value in list(module._parameters.items()) if value is not None)
