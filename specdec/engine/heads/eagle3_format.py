"""EAGLE-3 checkpoints: what their two kinds of configuration say, as one description.

The original one (`architectures: ["LlamaForCausalLMEagle3"]`, a flat Llama configuration) and that of the `speculators`
library (`speculators_model_type: "eagle3"`, the layer's configuration nested). Both number layers as Transformers
numbers hidden states: j is what enters layer j, so the output of layer j - 1, and by default 2, L // 2 and L - 3.
Not here: tensors and arithmetic (`eagle3`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

from transformers import LlamaConfig

from specdec.engine.heads.base import TargetParts
from specdec.engine.heads.head_file import HeadFile, refusal

_LAYER_TYPES = ("llama", "qwen3")
#: Of the others, frequencies change with the longest sequence of the batch.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Eagle3Format:
    """What an EAGLE-3 head is, apart from its numbers."""

    layer: LlamaConfig
    """Of its own decoder layers; sizes, norms and positions."""
    feature_layers: tuple[int, ...]
    """Target layers, counted from 0, whose outputs are its input; ascending."""
    draft_size: int | None
    """Tokens that it names; None: the configuration does not say."""
    norms_before_residual: bool
    """The first layer's residual is the normalised feature."""
    norms_output: bool
    """What stands for the feature of a drafted token is normalised."""

    @property
    def num_kv_heads(self) -> int:
        return cast(int, self.layer.num_key_value_heads)  # set where a configuration is made, as the next one

    @property
    def head_dim(self) -> int:
        return cast(int, self.layer.head_dim)


def read_format(file: HeadFile, target: TargetParts) -> Eagle3Format:
    """Reads a head's configuration.

    Raises:
        InvalidRequest: it is of another kind, or asks for what this target or this code does not have.
    """
    config = file.config
    if not config:
        raise refusal(f"{file.path} has no config.json beside it: an EAGLE-3 head needs one")
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise refusal(f"{file.path} is a head of type {kind}, not eagle3")
    nested = config if kind is None else config.get("transformer_layer_config")
    if not isinstance(nested, dict):
        raise refusal(f"{file.path}: its config.json has no transformer_layer_config")
    if kind is not None and not isinstance(config.get("norm_before_residual"), bool):
        raise refusal(f"{file.path}: its config.json does not say norm_before_residual")
    named = config.get("eagle_aux_hidden_state_layer_ids")
    if named is None and isinstance(config.get("eagle_config"), dict):
        named = config["eagle_config"].get("eagle_aux_hidden_state_layer_ids")
    return Eagle3Format(
        layer=_layer_config(file, nested),
        feature_layers=_feature_layers(file, named, target.config.num_hidden_layers),
        draft_size=config.get("draft_vocab_size"),
        norms_before_residual=bool(config.get("norm_before_residual", False)),
        norms_output=bool(config.get("norm_output", False)),
    )


def _layer_config(file: HeadFile, values: dict[str, Any]) -> LlamaConfig:
    """The decoder layer's own configuration."""
    kind = values.get("model_type", "llama")
    if kind not in _LAYER_TYPES:
        raise refusal(f"{file.path}: its layers are of type {kind}; {' and '.join(_LAYER_TYPES)} are known")
    if set(values.get("layer_types") or ()) - {"full_attention"}:
        raise refusal(f"{file.path}: its layers attend within a window, which is not known here")
    required = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    if missing := [name for name in required if values.get(name) is None]:
        raise refusal(f"{file.path}: its config.json does not say {missing[0]}")
    for name in (*required, "num_key_value_heads", "head_dim"):
        size = values.get(name)
        if size is not None and not (isinstance(size, int) and 0 < size < 1 << 24):
            raise refusal(f"{file.path}: its config.json says {name} {str(size)[:32]}")
    try:
        # The name alone: all that is read of it both types have.
        named = {name: value for name, value in values.items() if name not in ("model_type", "dtype")}
        layer = LlamaConfig(**copy.deepcopy(named))  # it writes into what is nested in there
    except Exception as error:  # it raises whatever a wrong value happens to
        raise refusal(f"{file.path}: its config.json is no layer's ({type(error).__name__})") from error
    rope_type = (layer.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        raise refusal(f"{file.path}: positions of type {rope_type} are not known here")
    if (layer.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        raise refusal(f"{file.path}: it encodes positions in a part of each head, which is not known here")
    if layer.num_attention_heads % cast(int, layer.num_key_value_heads):
        raise refusal(
            f"{file.path}: {layer.num_attention_heads} heads do not share {layer.num_key_value_heads} KV heads"
        )
    if layer.hidden_act not in ("silu", "swish"):
        raise refusal(f"{file.path}: the activation {layer.hidden_act} is not known here")
    return layer


def _feature_layers(file: HeadFile, named: object, num_layers: int) -> tuple[int, ...]:
    """From the checkpoint's numbers of hidden states to the layers that put them out."""
    states = sorted({2, num_layers // 2, num_layers - 3}) if named is None else named
    if not isinstance(states, list) or not all(type(state) is int for state in states) or not states:
        raise refusal(f"{file.path}: eagle_aux_hidden_state_layer_ids is not a list of layers")
    if sorted(set(states)) != states or states[0] < 1 or states[-1] > num_layers:
        raise refusal(
            f"{file.path} reads the hidden states {states}; this target has 1 to {num_layers}, to be named in order"
        )
    return tuple(state - 1 for state in states)
