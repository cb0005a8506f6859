"""Make transformers' class of a checkpoint and load its weights: of a model that also reads images, its text half.

Transformers' class of such a checkpoint is made without its other modules: the decoder, the embedding table and the
head remain, with the class's own forward pass and its own names of weights. The text is therefore that of `generate()`
for prompts of text, and there is no table of families. Tensors of other modules are never read, and files that hold
nothing else need not exist. Called by `engine.loader` and `engine.parallel.rank_loader`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

from specdec.checkpoints.weight_files import safetensors_files
from specdec.engine.model.checkpoint_model import has_other_half, load_weights, quietly
from specdec.engine.model.layer_probe import PROBE_NAME


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class that computes the text of a configuration that `load_config` returned."""
    if not has_other_half(config):
        return cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    whole = cast(type[PreTrainedModel], MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)])

    def make(model: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        whole.__init__(model, *arguments, **options)
        _drop_other_half(model)

    def set_quietly(model: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        with quietly():  # it warns of configurations without modules
            whole.set_attn_implementation(model, *arguments, **options)

    # Transformers finds the conversion of a checkpoint's weights by the name and the module of the class.
    return type(whole.__name__, (whole,), {"__init__": make, "set_attn_implementation": set_quietly,
                                                "__module__": whole.__module__})  # fmt: skip


def make_whole(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model without weights, for its shape."""
    with torch.device("meta"):
        if has_other_half(config):
            return model_class(config)._from_config(config, attn_implementation=PROBE_NAME)
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
    with _stored_tensors(name, directory) as tensors:
        if not tensors:  # the files have PyTorch's own format
            return load_weights(name, model_class(config), directory, **options)
        half = load_weights(name, model_class(config), None, state_dict=tensors, **options)
    half.config.name_or_path = str(directory)  # heads of the checkpoint are read from there
    return half


@contextmanager
def _stored_tensors(name: str, directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the tensors of the safetensors files that exist, by their names; each is read when it is indexed."""
    with ExitStack() as files:
        tensors: dict[str, Any] = {}
        for path in safetensors_files(name, directory):
            if path.is_file():
                file = files.enter_context(safe_open(path, framework="pt"))
                tensors |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        yield tensors


def _drop_other_half(model: PreTrainedModel) -> None:
    """Remove all parameters of a model except those of its decoder, its embedding table and its head."""
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    _drop_others(model, {module for part in parts if part is not None for module in part.modules()})
    left = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = model.all_tied_weights_keys
    model.all_tied_weights_keys = {name: source for name, source in tied.items() if {name, source} <= left}


def _drop_others(module: nn.Module, kept: set[nn.Module]) -> None:
    """Remove the modules that neither are nor contain one of `kept`, and the parameters of those that contain one."""
    for name in module._parameters:
        module._parameters[name] = None
    for name, child in list(module.named_children()):
        if child in kept:
            continue
        if kept.isdisjoint(child.modules()):
            module._modules[name] = None
        else:
            _drop_others(child, kept)
