"""Terms that describe an architecture of GGUF files. `specdec.checkpoints.gguf.table` describes each one by them.

Keys are named without the prefix of the architecture, tensors without the prefix of their layer and without `.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from specdec.checkpoints.gguf.file import GgufFile
from specdec.checkpoints.gguf.numbers import ModelNumbers
from specdec.checkpoints.gguf.rope import Rope

#: Stands for the value of a key that every file has.
REQUIRED = object()

#: Letters of the sizes in `SHAPES`: hidden size, width of the MLP, of all queries, of all keys, of one head,
#: vocabulary, context, experts, width of an expert, of the shared expert, heads; width of the inputs that each layer
#: has besides, and of those of all layers together.
LETTERS = "HFQKDVCEXSNPB"

#: Shapes of tensors, outermost dimension first.
SHAPES: Mapping[str, str] = {
    "token_embd": "V,H", "position_embd": "C,H", "output": "V,H",
    **dict.fromkeys(("output_norm", "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), "H"),
    "attn_q": "Q,H", "attn_k": "K,H", "attn_v": "K,H", "attn_qkv": "Q+2K,H", "attn_output": "H,Q",
    "attn_q_norm": "D", "attn_k_norm": "D", "attn_sinks": "N",
    "ffn_gate": "F,H", "ffn_up": "F,H", "ffn_down": "H,F",
    "ffn_gate_inp": "E,H", "ffn_gate_up_exps": "E,2X,H", "ffn_gate_exps": "E,X,H", "ffn_up_exps": "E,X,H",
    "ffn_down_exps": "E,H,X", "ffn_gate_inp_shexp": "1,H", "ffn_gate_shexp": "S,H", "ffn_up_shexp": "S,H",
    "ffn_down_shexp": "H,S", "ffn_gate_inp.scale": "H", "ffn_down_exps.scale": "E",
    **dict.fromkeys(("post_ffw_norm_1", "post_ffw_norm_2", "pre_ffw_norm_2", "post_norm"), "H"),
    "inp_gate": "P,H", "proj": "H,P", "layer_output_scale": "1", "per_layer_token_embd": "V,B",
    "per_layer_model_proj": "B,H", "per_layer_proj_norm": "P",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Number:
    """Meaning of a key."""

    field: str
    """Field of config.json."""
    default: Any = REQUIRED
    """Value without the key, or a function of the sizes that returns it."""
    zero: Any = 0
    """Value if the key is 0, which may stand for none."""
    is_count: bool = False
    """True for a size."""


@dataclass(frozen=True, slots=True)
class Window:
    """Window within which some or all layers attend."""

    default: int | None = None
    """Width without the key; None: no window."""
    period: int | None = None
    """Every how many layers one has no window, without the key; None: config.json does not say it by layer."""
    is_required_by_layers: bool = False
    """True if config.json has a width even if no layer has a window."""


class ByLayer(Protocol):
    """Architecture whose layers differ in sizes and weights."""

    def fields(self, file: GgufFile, numbers: ModelNumbers) -> dict[str, Any]:
        """Return fields of config.json that state the differences, and leave one number for all layers in `numbers`."""
        ...

    def outer(self, config: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the tensors outside the layers; see `Architecture.outer`."""
        ...

    def layer(self, config: Mapping[str, Any], index: int) -> Mapping[str, str]:
        """Return the tensors of a layer; see `Architecture.layer`."""
        ...

    def sizes(self, config: Mapping[str, Any], index: int) -> dict[str, int]:
        """Return the sizes of a layer; see `sizes_of`."""
        ...

    def is_unused(self, config: Mapping[str, Any], tensor: str) -> bool:
        """Return whether files may have a tensor that the model does not use."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One architecture."""

    model_type: str
    layer: Mapping[str, str]
    """Tensors of a layer by the names of the parameters, without `.weight`."""
    outer: Mapping[str, str] = field(
        default_factory=lambda: {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    )
    """Tensors outside the layers, except the head."""
    layers: str = "model.layers"
    """Prefix of the parameters of layers."""
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors with a bias, by the field of config.json that says so, which is set if a file has the first bias; "" for
    those that always have one."""
    shapes: Mapping[str, str] = field(default_factory=dict)
    """Shapes other than those of `SHAPES`."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the architecture implies."""
    numbers: Mapping[str, Number] = field(default_factory=dict)
    """Keys besides those of every architecture."""
    unused: tuple[str, ...] = ()
    """Keys that mean nothing for the model: they describe how images are read, or layers of a related model."""
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    """Key and field of the small number in norms."""
    mlp_field: str = "intermediate_size"
    """Field of `feed_forward_length`."""
    has_head_dim: bool = True
    """True if heads may be wider or narrower than their share of the hidden size."""
    num_layers_scaled_by_width: int | None = None
    """Number of layers of the one Gemma that scales attention by the share of the hidden size, instead of by the width
    of a head; None for others."""
    rope: Rope | None = field(default_factory=Rope)
    """Rotary embedding; None without one."""
    window: Window | None = None
    is_paired: bool = False
    """True if the rows of queries and keys are stored in the order of rotated pairs."""
    adds_one_to_norms: bool = False
    """True if 1 is added to the stored weights of norms."""
    transposed: tuple[str, ...] = ()
    """Tensors that the parameter holds transposed."""
    alternates_experts: bool = False
    """True if the parameter of experts holds each gate next to the other input that it multiplies."""
    by_layer: ByLayer | None = None
    """Differences from layer to layer; None if layers differ in their windows at most."""
    variants: Mapping[str, Architecture] = field(default_factory=dict)
    """Other types of model of the same architecture, by a key that is not 0 in them alone."""


def sizes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of a model by their `LETTERS`; 0 for one that it does not have.

    Args:
        config: content of config.json.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    mlp = config.get("intermediate_size") or config.get("n_inner") or 0
    per_layer = config.get("hidden_size_per_layer_input", 0)
    sizes = (
        hidden, mlp, heads * width, config["num_key_value_heads"] * width, width, config["vocab_size"],
        config["max_position_embeddings"], config.get("num_experts") or config.get("num_local_experts") or 0,
        config.get("moe_intermediate_size") or mlp, config.get("shared_expert_intermediate_size") or 0, heads,
        per_layer, per_layer * config["num_hidden_layers"],
    )  # fmt: skip
    return dict(zip(LETTERS, sizes, strict=True))
