"""The architectures of GGUF files: what each key of their metadata means, and which parameter each tensor is.

An architecture is stated by what sets it apart: the type of model in transformers, the fields of config.json that its
keys set, with llama.cpp's value for a key that a file leaves out, the fields that it implies, and the names of its
weights. Read by `specdec.checkpoints.gguf.architectures` and `specdec.checkpoints.gguf.weights`.

Sources: llama.cpp, `load_arch_hparams` and `load_arch_tensors` of each model, and its converter from checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.checkpoints.gguf.description import Architecture, Number, Window
from specdec.checkpoints.gguf.gemma4 import Gemma4
from specdec.checkpoints.gguf.rope import Rope

_ATTENTION = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}  # fmt: skip
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_LATE_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_GEMMA_NORMS = {"input_layernorm": "attn_norm", "pre_feedforward_layernorm": "ffn_norm", **_LATE_NORMS}
_PLAIN_MLP = {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_MLP = {"mlp.gate_proj": "ffn_gate", **_PLAIN_MLP}
_EXPERTS = {
    "mlp.gate": "ffn_gate_inp", "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip
_SHARED_EXPERT = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
_DENSE = {**_ATTENTION, **_MLP, **_NORMS}

_QKV = ("attn_q", "attn_k", "attn_v")
_ATTENTION_BIAS = {"attention_bias": (*_QKV, "attn_output")}
_LLAMA_BIASES = {**_ATTENTION_BIAS, "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down")}
_LAYER_NORM_BIASES = ("attn_norm", "ffn_norm", "output_norm")
_NO_WINDOW = {"use_sliding_window": False}

_EXPERTS_USED = {"expert_used_count": Number("num_experts_per_tok", is_count=True)}
_NUM_EXPERTS = {"expert_count": Number("num_experts", is_count=True), **_EXPERTS_USED}
_LOCAL_EXPERTS = {"expert_count": Number("num_local_experts", is_count=True), **_EXPERTS_USED}
_EXPERT_WIDTH = {"expert_feed_forward_length": Number("moe_intermediate_size", is_count=True)}
_FINAL_CAP = Number("final_logit_softcapping", None, zero=None)


def _by_head(sizes: Mapping[str, int]) -> float:
    """Return the usual scale of attention."""
    return float(sizes["D"] ** -0.5)


def _mlp_width(sizes: Mapping[str, int]) -> int:
    """Return the width of the MLP."""
    return sizes["F"]


_GRANITE_SCALES = {
    "logit_scale": Number("logits_scaling"),
    "residual_scale": Number("residual_multiplier", 1.0, zero=1.0),
    "embedding_scale": Number("embedding_multiplier", 1.0, zero=1.0),
    "attention.scale": Number("attention_multiplier", _by_head, zero=_by_head),
}

#: Keys that Granite 4 has for layers of other kinds and for experts, even if it has none of these.
_HYBRID_KEYS = (
    "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.inner_size", "ssm.time_step_rank",
    "expert_shared_feed_forward_length",
)  # fmt: skip

_GEMMA: Mapping[str, Any] = {
    "constants": {"hidden_activation": "gelu_pytorch_tanh"},
    "biases": _ATTENTION_BIAS,
    "adds_one_to_norms": True,
}
_LLAMA: Mapping[str, Any] = {"layer": _DENSE, "biases": _LLAMA_BIASES, "is_paired": True}

_MIXTRAL = Architecture(
    model_type="mixtral", layer={**_ATTENTION, **_EXPERTS, **_NORMS}, numbers=_LOCAL_EXPERTS, is_paired=True,
    constants={"sliding_window": None},
)  # fmt: skip
_OLMO3 = Architecture(
    model_type="olmo3", layer={**_ATTENTION, **_HEAD_NORMS, **_MLP, **_LATE_NORMS}, biases=_ATTENTION_BIAS,
    shapes={"attn_q_norm": "Q", "attn_k_norm": "K"}, has_head_dim=False, rope=Rope(has_local=True),
    window=Window(period=4),
)  # fmt: skip
_MINISTRAL3 = Architecture(
    model_type="ministral3", layer=_DENSE, is_paired=True, constants={"sliding_window": None},
    rope=Rope(reads_divisors=True, has_temperature=True),
)  # fmt: skip

_LANGUAGE_MODELS: dict[str, Architecture] = {
    "llama": Architecture(
        model_type="llama", **_LLAMA, rope=Rope(reads_divisors=True), variants={"expert_count": _MIXTRAL}
    ),
    "mistral3": Architecture(
        model_type="mistral", layer=_DENSE, is_paired=True, constants={"sliding_window": None},
        rope=Rope(reads_divisors=True), variants={"attention.temperature_scale": _MINISTRAL3},
    ),
    "arcee": Architecture(
        model_type="arcee", layer={**_ATTENTION, **_PLAIN_MLP, **_NORMS}, is_paired=True,
        biases={**_ATTENTION_BIAS, "mlp_bias": ("ffn_up", "ffn_down")}, constants={"hidden_act": "relu2"},
        rope=Rope(reads_divisors=True),
    ),
    "smollm3": Architecture(
        model_type="smollm3", **_LLAMA, has_head_dim=False, constants={**_NO_WINDOW, "no_rope_layer_interval": 4}
    ),
    "granite": Architecture(
        model_type="granite", **_LLAMA, numbers=_GRANITE_SCALES, has_head_dim=False, unused=_HYBRID_KEYS,
        rope=Rope(reads_divisors=True, is_switchable=True),
    ),
    "granitemoe": Architecture(
        model_type="granitemoe", has_head_dim=False, is_paired=True, biases=_ATTENTION_BIAS,
        layer={**_ATTENTION, **_NORMS, "block_sparse_moe.router": "ffn_gate_inp",
               "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps",
               "block_sparse_moe.experts.down_proj": "ffn_down_exps"},
        numbers={**_GRANITE_SCALES, **_LOCAL_EXPERTS}, rope=Rope(reads_divisors=True, is_switchable=True),
    ),
    "qwen2": Architecture(
        model_type="qwen2", layer=_DENSE, biases={"": _QKV}, constants=_NO_WINDOW, has_head_dim=False
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe", layer={**_ATTENTION, **_EXPERTS, **_SHARED_EXPERT, **_NORMS}, has_head_dim=False,
        biases={"qkv_bias": _QKV},
        numbers={**_NUM_EXPERTS, **_EXPERT_WIDTH, "expert_shared_feed_forward_length": Number(
            "shared_expert_intermediate_size", _mlp_width, zero=_mlp_width, is_count=True)},
        constants={**_NO_WINDOW, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3": Architecture(
        model_type="qwen3", layer={**_DENSE, **_HEAD_NORMS}, biases=_ATTENTION_BIAS, constants=_NO_WINDOW
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe", layer={**_ATTENTION, **_HEAD_NORMS, **_EXPERTS, **_NORMS}, biases=_ATTENTION_BIAS,
        numbers={**_NUM_EXPERTS, **_EXPERT_WIDTH},
        constants={**_NO_WINDOW, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "gemma": Architecture(model_type="gemma", layer=_DENSE, **_GEMMA),
    "gemma2": Architecture(
        model_type="gemma2", layer={**_ATTENTION, **_MLP, **_GEMMA_NORMS}, **_GEMMA, num_layers_scaled_by_width=46,
        numbers={"attn_logit_softcapping": Number("attn_logit_softcapping", 50.0, zero=None),
                 "final_logit_softcapping": Number("final_logit_softcapping", 30.0, zero=None)},
        window=Window(4096, 2, is_required_by_layers=True),
    ),
    "gemma3": Architecture(
        model_type="gemma3_text", layer={**_ATTENTION, **_HEAD_NORMS, **_MLP, **_GEMMA_NORMS}, **_GEMMA,
        numbers={"final_logit_softcapping": _FINAL_CAP}, num_layers_scaled_by_width=62,
        rope=Rope(has_local=True, local_base=10_000.0), window=Window(None, 6, is_required_by_layers=True),
    ),
    "gemma4": Architecture(
        model_type="gemma4_text", layer={}, by_layer=Gemma4(), constants={"hidden_activation": "gelu_pytorch_tanh"},
        numbers={"final_logit_softcapping": Number("final_logit_softcapping", 30.0, zero=None)},
        rope=Rope(has_local=True, local_base=10_000.0, is_proportional=True),
        window=Window(None, 6, is_required_by_layers=True),
    ),
    "phi3": Architecture(
        model_type="phi3", has_head_dim=False, shapes={"ffn_up": "2F,H"},
        layer={"self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "mlp.gate_up_proj": "ffn_up",
               "mlp.down_proj": "ffn_down", **_NORMS},
        rope=Rope(is_partial=True, is_long=True), window=Window(),
    ),
    "starcoder2": Architecture(
        model_type="starcoder2", layer={**_ATTENTION, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", **_NORMS},
        biases={"": _LAYER_NORM_BIASES, "use_bias": (*_QKV, "attn_output", "ffn_up", "ffn_down")},
        epsilon=("attention.layer_norm_epsilon", "norm_epsilon"), has_head_dim=False, window=Window(),
        constants={"hidden_act": "gelu_pytorch_tanh"},
    ),
    "nemotron": Architecture(
        model_type="nemotron", layer={**_ATTENTION, **_PLAIN_MLP, **_NORMS},
        biases={"": _LAYER_NORM_BIASES, **_ATTENTION_BIAS, "mlp_bias": ("ffn_up", "ffn_down")},
        epsilon=("attention.layer_norm_epsilon", "norm_eps"), rope=Rope(is_partial=True), adds_one_to_norms=True,
        constants={"hidden_act": "relu2"},
    ),
    "gpt2": Architecture(
        model_type="gpt2", layers="transformer.h",
        outer={"transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm"},
        layer={"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm",
               "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        biases={"": (*_LAYER_NORM_BIASES, "attn_qkv", "attn_output", "ffn_up", "ffn_down")},
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"), has_head_dim=False, mlp_field="n_inner",
        epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"), rope=None,
        constants={"activation_function": "gelu_new"},
    ),
    "olmo2": Architecture(
        model_type="olmo2", layer=_OLMO3.layer, biases=_ATTENTION_BIAS, shapes=_OLMO3.shapes, has_head_dim=False,
        variants={"attention.sliding_window": _OLMO3},
    ),
    "olmoe": Architecture(
        model_type="olmoe", layer={**_ATTENTION, **_HEAD_NORMS, **_EXPERTS, **_NORMS}, biases=_ATTENTION_BIAS,
        shapes=_OLMO3.shapes, has_head_dim=False, numbers={
            **_NUM_EXPERTS, "attention.clamp_kqv": Number("clip_qkv", None, zero=None)},
        constants={"norm_topk_prob": False},
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss", transposed=("ffn_gate_up_exps", "ffn_down_exps"), alternates_experts=True,
        layer={**_ATTENTION, "self_attn.sinks": "attn_sinks", "input_layernorm": "attn_norm",
               "post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp",
               "mlp.experts.gate_up_proj": "ffn_gate_up_exps", "mlp.experts.down_proj": "ffn_down_exps"},
        biases={"": ("ffn_gate_inp", "ffn_gate_up_exps", "ffn_down_exps"), **_ATTENTION_BIAS},
        numbers={**_LOCAL_EXPERTS, "expert_feed_forward_length": Number("intermediate_size", is_count=True)},
        rope=Rope(yarn={"truncate": False}), window=Window(None, 2, is_required_by_layers=True),
    ),
    "exaone4": Architecture(
        model_type="exaone4", layer={**_ATTENTION, **_HEAD_NORMS, **_MLP, **_LATE_NORMS}, has_head_dim=False,
        rope=Rope(reads_divisors=True), window=Window(None, 4),
    ),
    "ernie4_5": Architecture(
        model_type="ernie4_5", layer=_DENSE, biases={"use_bias": (*_QKV, "attn_output", "ffn_gate", "ffn_up",
                                                                  "ffn_down")},
    ),
    "glm4": Architecture(
        model_type="glm4", shapes={"ffn_up": "2F,H"}, biases={"attention_bias": _QKV}, rope=Rope(is_partial=True),
        layer={**_ATTENTION, **_NORMS, "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
               "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    ),
    "seed_oss": Architecture(
        model_type="seed_oss",
        layer={**_ATTENTION, **_MLP, "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"},
        biases={"attention_bias": _QKV, "attention_out_bias": ("attn_output",),
                "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down")},
    ),
    "hunyuan-dense": Architecture(
        model_type="hunyuan_v1_dense", biases=_ATTENTION_BIAS,
        layer={**_DENSE, "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
    ),
    "command-r": Architecture(
        model_type="cohere", layer={**_ATTENTION, **_MLP, "input_layernorm": "attn_norm"}, biases=_ATTENTION_BIAS,
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"), has_head_dim=False,
        numbers={"logit_scale": Number("logit_scale", 1.0, zero=1.0)}, constants={"use_qk_norm": False},
    ),
    "cohere2": Architecture(
        model_type="cohere2", layer={**_ATTENTION, **_MLP, "input_layernorm": "attn_norm"}, biases=_ATTENTION_BIAS,
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"), has_head_dim=False,
        numbers={"logit_scale": Number("logit_scale", zero=1.0)}, window=Window(None, 4, is_required_by_layers=True),
    ),
}  # fmt: skip


# The text of a vision model is a model of its own: without images, all positions of a token are equal.
_OF_TEXT = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
_IMAGE_KEYS = ("rope.dimension_sections", "n_deepstack_layers")

#: Architectures by `general.architecture`.
ARCHITECTURES: Mapping[str, Architecture] = _LANGUAGE_MODELS | {
    name: replace(_LANGUAGE_MODELS[text], unused=_IMAGE_KEYS) for name, text in _OF_TEXT.items()
}


def architecture_of(name: str, numbers: Mapping[str, Any]) -> Architecture | None:
    """Return an architecture; None if it is unknown here.

    Args:
        name: value of `general.architecture`.
        numbers: the file's metadata, which tells variants apart.
    """
    found = ARCHITECTURES.get(name)
    variants = found.variants.items() if found else ()
    return next((variant for key, variant in variants if numbers.get(f"{name}.{key}")), found)
