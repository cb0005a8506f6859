"""Read the two kinds of configuration of EAGLE-3 checkpoints into one description.

They are the original one (`architectures: ["LlamaForCausalLMEagle3"]`, a flat Llama configuration) and that of the
`speculators` library (`speculators_model_type: "eagle3"`, with the layer's configuration nested). Both number layers as
Transformers numbers hidden states: state j is the input of layer j, that is, the output of layer j - 1. The default is
states 2, L // 2 and L - 3. Called by `eagle3`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

from transformers import LlamaConfig

from specdec.engine.heads.head_file import HeadFile, refusal
from specdec.engine.heads.interface import TargetParts

_LAYER_TYPES = ("llama", "qwen3")
#: Frequencies of other types change with the longest sequence of the batch.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Eagle3Format:
    """Configuration of an EAGLE-3 head."""

    layer: LlamaConfig
    """Configuration of the head's own decoder layers: sizes, norms and positions."""
    feature_layers: tuple[int, ...]
    """Indices, ascending, of the target layers whose outputs are the head's input."""
    draft_size: int | None
    """Size of the draft vocabulary; None if the configuration does not say."""
    norms_before_residual: bool
    """True if the first layer's residual is the normalised feature."""
    norms_output: bool
    """True if a drafted token's feature is the normalised output."""

    @property
    def num_kv_heads(self) -> int:
        return cast(int, self.layer.num_key_value_heads)  # always set by LlamaConfig, as is head_dim

    @property
    def head_dim(self) -> int:
        return cast(int, self.layer.head_dim)


def read_format(file: HeadFile, target: TargetParts) -> Eagle3Format:
    """Read a head's configuration.

    Raises:
        InvalidRequest: the head is of another kind, or needs what this target or this engine does not have.
    """
    config = file.config
    if not config:
        raise refusal(f"{file.path} has no config.json beside it, which an EAGLE-3 head needs")
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise refusal(f"{file.path} is a head of type {kind}, not eagle3")
    nested = config if kind is None else config.get("transformer_layer_config")
    if not isinstance(nested, dict):
        raise refusal(f"{file.path}: its config.json has no transformer_layer_config")
    if kind is not None and not isinstance(config.get("norm_before_residual"), bool):
        raise refusal(f"{file.path}: its config.json lacks norm_before_residual")
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
    """Return the decoder layer's own configuration."""
    kind = values.get("model_type", "llama")
    if kind not in _LAYER_TYPES:
        raise refusal(f"{file.path}: its layers are of type {kind}; {' and '.join(_LAYER_TYPES)} are supported")
    if set(values.get("layer_types") or ()) - {"full_attention"}:
        raise refusal(f"{file.path}: its layers attend within a window, which is not supported")
    required = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    if missing := [name for name in required if values.get(name) is None]:
        raise refusal(f"{file.path}: its config.json lacks {missing[0]}")
    for name in (*required, "num_key_value_heads", "head_dim"):
        size = values.get(name)
        if size is not None and not (isinstance(size, int) and 0 < size < 1 << 24):
            raise refusal(f"{file.path}: its config.json has an invalid {name}: {str(size)[:32]}")
    try:
        # The type differs in its name alone: both types have all fields that are read.
        named = {name: value for name, value in values.items() if name not in ("model_type", "dtype")}
        layer = LlamaConfig(**copy.deepcopy(named))  # LlamaConfig changes nested values
    except Exception as error:  # an invalid value may raise any error
        raise refusal(
            f"{file.path}: its config.json does not describe a decoder layer ({type(error).__name__})"
        ) from error
    rope_type = (layer.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        raise refusal(f"{file.path}: rotary positions of type {rope_type} are not supported")
    if (layer.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        raise refusal(f"{file.path}: it encodes positions in a part of each head, which is not supported")
    if layer.num_attention_heads % cast(int, layer.num_key_value_heads):
        raise refusal(
            f"{file.path}: {layer.num_key_value_heads} KV heads do not divide its {layer.num_attention_heads} heads"
        )
    if layer.hidden_act not in ("silu", "swish"):
        raise refusal(f"{file.path}: the activation {layer.hidden_act} is not supported")
    return layer


def _feature_layers(file: HeadFile, named: object, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose outputs are the hidden states that the checkpoint names."""
    states = sorted({2, num_layers // 2, num_layers - 3}) if named is None else named
    if not isinstance(states, list) or not all(type(state) is int for state in states) or not states:
        raise refusal(f"{file.path}: eagle_aux_hidden_state_layer_ids is not a list of layers")
    if sorted(set(states)) != states or states[0] < 1 or states[-1] > num_layers:
        raise refusal(
            f"{file.path} reads the hidden states {states}, which must be ascending and within this target's 1 to "
            f"{num_layers}"
        )
    return tuple(state - 1 for state in states)
