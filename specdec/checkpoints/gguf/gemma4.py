"""Gemma 4 in GGUF files: layers with and without a window have other heads, and the last ones may reuse keys.

Called by `specdec.checkpoints.gguf.table`.

Source: llama.cpp, `llama_model_gemma4`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specdec.checkpoints.counts import MOST_LAYERS
from specdec.checkpoints.gguf.description import sizes_of
from specdec.checkpoints.gguf.file import GgufFile
from specdec.checkpoints.gguf.numbers import ModelNumbers

_QUERIES = {
    "self_attn.q_proj": "attn_q", "self_attn.q_norm": "attn_q_norm", "self_attn.o_proj": "attn_output",
}  # fmt: skip
_KEYS = {"self_attn.k_proj": "attn_k", "self_attn.k_norm": "attn_k_norm"}
_VALUES = {"self_attn.v_proj": "attn_v"}
_REST = {
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "layer_scalar": "layer_output_scale",
}  # fmt: skip
_INPUTS = {
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
}  # fmt: skip
_EXPERTS = {
    "router.proj": "ffn_gate_inp", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps",
    "experts.down_proj": "ffn_down_exps", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
}  # fmt: skip
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
_OUTER_INPUTS = {
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip

_PATTERN = "attention.sliding_window_pattern"
_OF_KEYS = re.compile(r"blk\.(\d+)\.attn_(k|v|k_norm)\.weight")


class Gemma4:
    """Implements `description.ByLayer`."""

    def fields(self, file: GgufFile, numbers: ModelNumbers) -> dict[str, Any]:
        """Return the fields that state heads, shared keys, inputs and experts."""
        num_layers = numbers.count("block_count", most=MOST_LAYERS)
        numbers.put("block_count", num_layers)
        slides = numbers.take(_PATTERN)
        if not isinstance(slides, list) or len(slides) != num_layers or all(slides):
            numbers.refuse(_PATTERN, slides, f"for {num_layers} layers")
        numbers.put(_PATTERN, slides)
        num_shared = numbers.count("attention.shared_kv_layers", 0, least=0, most=num_layers - 1)
        embedding = file.tensors.get("per_layer_token_embd.weight")
        first_full = slides.index(False)
        return {
            "per_layer_config": _heads(numbers, slides),
            "num_kv_shared_layers": num_shared,
            "use_double_wide_mlp": _is_double_wide(numbers, num_layers, num_shared),
            "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in file.tensors,
            "hidden_size_per_layer_input": numbers.count("embedding_length_per_layer_input", 0, least=0),
            "vocab_size_per_layer_input": embedding.shape[0] if embedding else 0,
        } | _experts(numbers)

    def outer(self, config: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the tensors outside the layers."""
        return _OUTER | (_OUTER_INPUTS if config["hidden_size_per_layer_input"] else {})

    def layer(self, config: Mapping[str, Any], index: int) -> Mapping[str, str]:
        """Return the tensors of a layer."""
        is_alternative = config["attention_k_eq_v"] and str(index) in config["per_layer_config"]
        own = {} if _is_shared(config, index) else _KEYS | ({} if is_alternative else _VALUES)
        inputs = _INPUTS if config["hidden_size_per_layer_input"] else {}
        return _QUERIES | own | _REST | inputs | (_EXPERTS if config["enable_moe_block"] else {})

    def sizes(self, config: Mapping[str, Any], index: int) -> dict[str, int]:
        """Return the sizes of a layer."""
        is_double = config["use_double_wide_mlp"] and _is_shared(config, index)
        width = config["intermediate_size"] * (2 if is_double else 1)
        return sizes_of({**config, **config["per_layer_config"].get(str(index), {}), "intermediate_size": width})

    def is_unused(self, config: Mapping[str, Any], tensor: str) -> bool:
        """Return whether a tensor makes keys or values in a layer that reuses those of another."""
        found = _OF_KEYS.fullmatch(tensor)
        return found is not None and int(found[1]) < config["num_hidden_layers"] and _is_shared(config, int(found[1]))


def _is_shared(config: Mapping[str, Any], index: int) -> bool:
    return bool(index >= config["num_hidden_layers"] - config["num_kv_shared_layers"])


def _heads(numbers: ModelNumbers, slides: list[bool]) -> dict[str, dict[str, int]]:
    """Return what layers without a window have instead; leave the heads of the other layers in `numbers`."""
    width, heads = numbers.count("attention.key_length"), numbers.take("attention.head_count_kv")
    own = {"head_dim": width}
    numbers.require("attention.value_length", width)
    numbers.require("rope.dimension_count", width)
    local_width = numbers.count("attention.key_length_swa", width)
    numbers.require("attention.value_length_swa", local_width)
    numbers.put("attention.key_length", local_width)
    if isinstance(heads, list) and len(heads) == len(slides):
        local, full = ({count for count, slide in zip(heads, slides, strict=True) if bool(slide) is kind}
                       for kind in (True, False))  # fmt: skip
        if len(local) > 1 or len(full) > 1:
            numbers.refuse("attention.head_count_kv", heads, "which differ within a kind of layer")
        heads = [*full, *local][-1]
        numbers.put("attention.head_count_kv", *full)
        own["num_key_value_heads"] = numbers.count("attention.head_count_kv")
    if heads is not None:
        numbers.put("attention.head_count_kv", heads)
    return {str(index): own for index, slide in enumerate(slides) if not slide}


def _is_double_wide(numbers: ModelNumbers, num_layers: int, num_shared: int) -> bool:
    """Return whether layers with shared keys have an MLP of twice the width; leave the width of the others."""
    widths = numbers.take("feed_forward_length")
    numbers.put("feed_forward_length", widths[0] if isinstance(widths, list) and widths else widths)
    if not isinstance(widths, list) or widths == [*widths[:1]] * num_layers:
        return False
    if widths != [widths[0]] * (num_layers - num_shared) + [2 * widths[0]] * num_shared:
        numbers.refuse("feed_forward_length", widths, "which is not doubled in the layers with shared keys alone")
    return True


def _experts(numbers: ModelNumbers) -> dict[str, Any]:
    num_experts = numbers.count("expert_count", 0, least=0)
    if not num_experts:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": num_experts,
        "top_k_experts": numbers.count("expert_used_count"),
        "moe_intermediate_size": numbers.count("expert_feed_forward_length"),
    }
