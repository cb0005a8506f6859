"""Tiny models of each architecture of GGUF files, written as llama.cpp's converter writes them.

Their numbers are unusual: none is a default of its class. transformers' own logits of the model that was written are
the oracle of what a file computes. Called by tests of GGUF files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from bench.systems.gguf_writing import add_tokenizer
from specdec.checkpoints.gguf.architectures import config_of
from specdec.checkpoints.gguf.file import GgufFile
from specdec.engine.model.checkpoint_model import load_weights
from specdec.engine.model.layer_probe import register_probe

VOCABULARY_SIZE = 96
NUM_TOKENS = 60
SIZES = {
    "vocab_size": VOCABULARY_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
#: Weights of norms that are stored with 1 added.
SHIFTED_NORMS = ("gemma", "gemma2", "gemma3", "nemotron")
#: Queries and keys that are stored in the order of rotated pairs.
PAIRED = ("llama", "mistral3", "arcee", "smollm3", "granite", "granitemoe")
#: Parts of parameters that are stacked or joined, by the names of the tensors.
EXPERTS = {"experts.down_proj": "ffn_down_exps.weight", "shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
           "experts.down_proj_bias": "ffn_down_exps.bias", "self_attn.sinks": "attn_sinks.weight",
           "block_sparse_moe.router.weight": "ffn_gate_inp.weight", "router.scale": "ffn_gate_inp.scale",
           "router.per_expert_scale": "ffn_down_exps.scale", "layer_scalar": "layer_output_scale.weight",
           "router.proj.weight": "ffn_gate_inp.weight"}  # fmt: skip


def rope(base: float = 500.0, kind: str = "default", **others: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": base, **others}


def by_layer(local: float, **others: Any) -> dict[str, Any]:
    return {"full_attention": rope(700.0, **others), "sliding_attention": rope(local)}


#: Type, changes of its configuration, architecture of the file, and numbers beside those of every file.
Case = tuple[str, dict[str, Any], str, dict[str, Any]]
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 20, "tie_word_embeddings": True}
SCALES = {
    "attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 5.0,
}  # fmt: skip
STORED_SCALES = {"attention.scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 5.0}
EXPERT_COUNTS = {"expert_count": 4, "expert_used_count": 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {
    "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5,
}  # fmt: skip
STORED_YARN = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.yarn_attn_factor": 1.5,
}  # fmt: skip
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}
PATTERN = [False, True, False]
LAYERS = ["full_attention", "sliding_attention", "full_attention"]
LONG = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.5], "original_max_position_embeddings": 128}
GEMMA4 = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 20,
    "head_dim": 12, "global_head_dim": 16, "tie_word_embeddings": True, "final_logit_softcapping": 7.0,
    "rope_parameters": {
        "full_attention": rope(700.0, "proportional", partial_rotary_factor=0.25), "sliding_attention": rope(90.0),
    },
}  # fmt: skip
STORED_GEMMA4 = {
    "attention.key_length": 16, "attention.value_length": 16, "attention.key_length_swa": 12,
    "attention.value_length_swa": 12, "rope.dimension_count": 16, "rope.dimension_count_swa": 12,
    "attention.sliding_window": 20, "attention.sliding_window_pattern": [True, False] * 2, "rope.freq_base_swa": 90.0,
    "final_logit_softcapping": 7.0,
}  # fmt: skip
CASES: dict[str, Case] = {
    "llama": ("llama", {"rope_parameters": rope(), "rms_norm_eps": 1e-2}, "llama", {}),
    "llama with wide heads": ("llama", {"rope_parameters": rope(), "head_dim": 16}, "llama", {}),
    "llama with biases": (
        "llama", {"rope_parameters": rope(), "attention_bias": True, "mlp_bias": True}, "llama", {},
    ),
    "llama with linear scaling": ("llama", {"rope_parameters": rope(kind="linear", factor=3.0)}, "llama", LINEAR),
    "mixtral": (
        "mixtral", {"rope_parameters": rope(), "num_local_experts": 4, "sliding_window": None}, "llama", EXPERT_COUNTS,
    ),
    "mistral3": ("mistral", {"rope_parameters": rope(), "head_dim": 16, "sliding_window": None}, "mistral3", {}),
    "ministral3": (
        "ministral3",
        {"rope_parameters": rope(kind="yarn", **{key: YARN[key] for key in YARN if "attention" not in key},
                                 mscale=1.0, mscale_all_dim=0.5, llama_4_scaling_beta=0.3), "head_dim": 16},
        "mistral3",
        {**{key: STORED_YARN[key] for key in STORED_YARN if "attn" not in key},
         "rope.scaling.yarn_log_multiplier": 0.5, "attention.temperature_scale": 0.3},
    ),
    "arcee": ("arcee", {"rope_parameters": rope(), "head_dim": 16}, "arcee", {}),
    "smollm3": (
        "smollm3", {"rope_parameters": rope(), "num_hidden_layers": 5, "tie_word_embeddings": True}, "smollm3", {},
    ),
    "granite": ("granite", {"rope_parameters": rope(), **SCALES}, "granite", STORED_SCALES),
    "granite with keys of hybrid models": (
        "granite", {"rope_parameters": rope(), **SCALES}, "granite",
        {**STORED_SCALES, "ssm.conv_kernel": 4, "ssm.state_size": 256, "ssm.group_count": 1, "ssm.inner_size": 64,
         "ssm.time_step_rank": 2, "expert_shared_feed_forward_length": 48, "attention.head_count_kv": [2, 2, 2],
         "rope.scaling.finetuned": True},
    ),
    "granitemoe": (
        "granitemoe", {"rope_parameters": rope(), "num_local_experts": 4, **SCALES}, "granitemoe",
        {**STORED_SCALES, **EXPERT_COUNTS},
    ),
    "qwen2": ("qwen2", {"rope_parameters": rope(), "rms_norm_eps": 1e-2}, "qwen2", {}),
    "qwen2moe": (
        "qwen2_moe", {"rope_parameters": rope(), "shared_expert_intermediate_size": 40, **MOE}, "qwen2moe",
        {**EXPERT_COUNTS, "expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
    ),
    "qwen3": ("qwen3", {"rope_parameters": rope(), "head_dim": 12}, "qwen3", {}),
    "qwen3 with yarn": ("qwen3", {"rope_parameters": rope(kind="yarn", **YARN), "head_dim": 16}, "qwen3", STORED_YARN),
    "qwen2vl": ("qwen2", {"rope_parameters": rope()}, "qwen2vl", {"rope.dimension_sections": [2, 1, 1, 0]}),
    "qwen3vl": (
        "qwen3", {"rope_parameters": rope(), "head_dim": 12}, "qwen3vl",
        {"rope.dimension_sections": [2, 2, 2, 0], "n_deepstack_layers": 3},
    ),
    "qwen3vlmoe": (
        "qwen3_moe", {"rope_parameters": rope(), "head_dim": 12, "norm_topk_prob": True, **MOE}, "qwen3vlmoe",
        {**EXPERT_COUNTS, "expert_feed_forward_length": 24, "rope.dimension_sections": [2, 2, 2, 0]},
    ),
    "qwen3moe": (
        "qwen3_moe", {"rope_parameters": rope(), "head_dim": 12, "norm_topk_prob": True, **MOE}, "qwen3moe",
        {**EXPERT_COUNTS, "expert_feed_forward_length": 24},
    ),
    "starcoder2": ("starcoder2", {"rope_parameters": rope(), "norm_epsilon": 1e-2, "sliding_window": None},
                   "starcoder2", {}),
    "starcoder2 with a window": ("starcoder2", {"rope_parameters": rope(), "sliding_window": 30}, "starcoder2",
                                 {"attention.sliding_window": 30}),
    "phi3": (
        "phi3", {"rope_parameters": rope(partial_rotary_factor=0.5), "sliding_window": 30}, "phi3",
        {"rope.dimension_count": 4, "attention.sliding_window": 30, "rope.scaling.original_context_length": 256},
    ),
    "phi3 with long sequences": (
        "phi3",
        {"rope_parameters": rope(kind="longrope", partial_rotary_factor=0.5, **LONG),
         "original_max_position_embeddings": 128},
        "phi3",
        {"rope.dimension_count": 4, "attention.sliding_window": 0, "rope.scaling.original_context_length": 128,
         "rope.scaling.attn_factor": 1.0690449676496976},
    ),
    "nemotron": (
        "nemotron", {"rope_parameters": rope(partial_rotary_factor=0.25), "norm_eps": 1e-2, "head_dim": 8}, "nemotron",
        {"rope.dimension_count": 2, "rope.scaling.type": "none", "attention.layer_norm_rms_epsilon": 1e-2},
    ),
    "gpt2": ("gpt2", {"num_key_value_heads": None, "n_inner": 40, "layer_norm_epsilon": 1e-2}, "gpt2", {}),
    "olmo2": ("olmo2", {"rope_parameters": rope()}, "olmo2", {}),
    "olmo3": (
        "olmo3", {"rope_parameters": by_layer(700.0, kind="yarn", **YARN), "sliding_window": 20, "layer_types": LAYERS},
        "olmo2", {**STORED_YARN, "attention.sliding_window": 20, "attention.sliding_window_pattern": PATTERN},
    ),
    "olmoe": (
        "olmoe", {"rope_parameters": rope(), "clip_qkv": 1.5, "num_key_value_heads": 4, **MOE}, "olmoe",
        {**EXPERT_COUNTS, "attention.clamp_kqv": 1.5},
    ),
    "gemma": ("gemma", {"rope_parameters": rope(), "head_dim": 12, "tie_word_embeddings": True}, "gemma", {}),
    "gemma2": (
        "gemma2", {"rope_parameters": rope(), "attn_logit_softcapping": 3.0, "final_logit_softcapping": 7.0, **GEMMA},
        "gemma2",
        {"attention.sliding_window": 20, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 7.0},
    ),
    "gemma3": ("gemma3_text", {"rope_parameters": by_layer(10_000.0), **GEMMA}, "gemma3",
               {"attention.sliding_window": 20}),
    "gemma3 with layers of its own": (
        "gemma3_text",
        {"rope_parameters": by_layer(90.0, kind="linear", factor=3.0), "layer_types": LAYERS,
         "final_logit_softcapping": 9.0, **GEMMA},
        "gemma3",
        {"attention.sliding_window": 20, "attention.sliding_window_pattern": PATTERN, "rope.freq_base_swa": 90.0,
         "final_logit_softcapping": 9.0, **LINEAR},
    ),
    "gpt-oss": (
        "gpt_oss",
        {"rope_parameters": rope(kind="yarn", truncate=False, **YARN), "head_dim": 16, "num_local_experts": 4,
         "num_experts_per_tok": 2, "sliding_window": 20, "layer_types": LAYERS},
        "gpt-oss",
        {**STORED_YARN, **EXPERT_COUNTS, "expert_feed_forward_length": 48, "attention.sliding_window": 20,
         "attention.sliding_window_pattern": PATTERN},
    ),
    "gemma4": (
        "gemma4_text",
        {**GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY_SIZE,
         "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        "gemma4",
        {**STORED_GEMMA4, "embedding_length_per_layer_input": 8, "attention.shared_kv_layers": 2,
         "feed_forward_length": [48, 48, 96, 96]},
    ),
    "gemma4 with experts": (
        "gemma4_text",
        {**GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
         "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
        "gemma4",
        {**STORED_GEMMA4, **EXPERT_COUNTS, "expert_feed_forward_length": 24, "attention.head_count_kv": [2, 1, 2, 1]},
    ),
    "exaone4": (
        "exaone4", {"rope_parameters": rope(), "sliding_window": 20, "layer_types": LAYERS}, "exaone4",
        {"attention.sliding_window": 20, "attention.sliding_window_pattern": PATTERN},
    ),
    "exaone4 without windows": (
        "exaone4", {"rope_parameters": rope(), "sliding_window": None, "layer_types": ["full_attention"] * 3},
        "exaone4", {},
    ),
    "ernie4_5": ("ernie4_5", {"rope_parameters": rope(), "head_dim": 12, "use_bias": False}, "ernie4_5", {}),
    "glm4": (
        "glm4", {"rope_parameters": rope(partial_rotary_factor=0.5), "head_dim": 16, "attention_bias": True}, "glm4",
        {"rope.dimension_count": 8},
    ),
    "seed_oss": ("seed_oss", {"rope_parameters": rope(), "head_dim": 12, "attention_bias": True}, "seed_oss", {}),
    "hunyuan": ("hunyuan_v1_dense", {"rope_parameters": rope(), "head_dim": 12}, "hunyuan-dense",
                {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}),
    "cohere": (
        "cohere", {"rope_parameters": rope(), "logit_scale": 0.3, "tie_word_embeddings": True}, "command-r",
        {"logit_scale": 0.3, "rope.scaling.type": "none"},
    ),
    "cohere2": (
        "cohere2", {"rope_parameters": rope(), "logit_scale": 0.3, "sliding_window": 20, "layer_types": LAYERS,
                    "tie_word_embeddings": True},
        "cohere2",
        {"logit_scale": 0.3, "attention.sliding_window": 20, "attention.sliding_window_pattern": PATTERN},
    ),
}  # fmt: skip


def build(kind: str, changes: Mapping[str, Any]) -> PreTrainedModel:
    config = CONFIG_MAPPING[kind](**(SIZES | dict(changes)))
    torch.manual_seed(0)  # some classes begin with random vectors
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.config.allow_global_per_layer_attribute_access = True  # `stated_by` reads heads, which may differ by layer
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.1 * noise if parameter.ndim < 2 else noise / parameter.shape[-1] ** 0.5)
    return model


def stated_by(config: Any) -> dict[str, Any]:
    """Return the numbers that llama.cpp's converter stores of every model."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    eps = next(
        getattr(config, name, None)
        for name in ("norm_epsilon", "norm_eps", "layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps")
        if hasattr(config, name)
    )
    kind = "layer_norm_rms_epsilon" if hasattr(config, "rms_norm_eps") else "layer_norm_epsilon"
    return {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "n_inner", None) or config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None),
        "attention.key_length": width, "attention.value_length": width, "vocab_size": config.vocab_size,
        "rope.freq_base": parameters.get("rope_theta"), "rope.dimension_count": width if parameters else None,
        f"attention.{kind}": eps,
    }  # fmt: skip


def tensors_of(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """Return the tensors that llama.cpp's converter stores."""
    config = model.config
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tensors = {}
    for key, value in model.state_dict().items():
        array, layer = value.numpy(), next((part for part in key.split(".") if part.isdecimal()), "")
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "experts.gate_up_proj" in key:
            if architecture == "gpt-oss":
                array = array.swapaxes(1, 2) if array.ndim == 3 else array
                gate, up = array[:, ::2], array[:, 1::2]
            else:
                gate, up = np.split(array, 2, axis=1)
            end = "bias" if key.endswith("bias") else "weight"
            tensors |= {f"blk.{layer}.ffn_gate_exps.{end}": gate, f"blk.{layer}.ffn_up_exps.{end}": up}
            continue
        name = next((f"blk.{layer}.{EXPERTS[end]}" for end in EXPERTS if key.endswith(end)), None)
        if architecture in SHIFTED_NORMS and "norm" in key and key.endswith("weight"):
            array = array + 1
        if architecture in PAIRED and key.rsplit(".", 1)[0].endswith(("q_proj", "k_proj")):
            halves = array.reshape(-1, 2, width // 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if architecture == "gpt-oss" and key.endswith("down_proj"):
            array = array.swapaxes(1, 2)
        if architecture == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            array = array.T
        tensors[name or names.get_name(key, try_suffixes=(".weight", ".bias"))] = array
    return tensors


def write(
    path: Path,
    architecture: str,
    numbers: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kind: str = "F32",
    *,
    tokenizer: Path | None = None,
) -> Path:
    """Write a file.

    Args:
        path: the file.
        architecture: value of `general.architecture`.
        numbers: by their keys without the architecture; None leaves a key out.
        tensors: by their names in the file.
        kind: how matrices are stored, as `GGMLQuantizationType` names it, unless their rows do not fill its blocks.
        tokenizer: checkpoint with the tokenizer of the file; None: it has none.
    """
    writer = gguf.GGUFWriter(path, architecture)
    add = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32, list: writer.add_array}
    for name, value in numbers.items():
        if value is not None:
            add.get(type(value), writer.add_uint32)(f"{architecture}.{name}", value)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    for name, array in tensors.items():
        if array.dtype == np.int32:
            writer.add_tensor(name, array)
            continue
        fills = array.ndim > 1 and array.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] == 0
        stored = gguf.GGMLQuantizationType[kind if fills else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_case(
    case: Case,
    path: Path,
    *,
    extra: Mapping[str, np.ndarray] | None = None,
    tokenizer: Path | None = None,
    **changed: Any,
) -> Path:
    """Write the file of a case with further tensors, a checkpoint's tokenizer, and other numbers."""
    kind, changes, architecture, numbers = case
    model, extra = build(kind, changes), dict(extra or {})
    if "long_factor" in (parameters := getattr(model.config, "rope_parameters", None) or {}):
        extra |= {f"rope_factors_{name}.weight": np.array(parameters[f"{name}_factor"], np.float32)
                 for name in ("long", "short")}  # fmt: skip
    if architecture == "gemma4":  # a quarter of the frequencies of wide heads is rotated
        extra |= {"rope_freqs.weight": np.array([1, 1, *[1e30] * 6], np.float32)}
    tensors = tensors_of(model, architecture) | extra
    return write(path, architecture, stated_by(model.config) | numbers | changed, tensors, tokenizer=tokenizer)


def load(path: Path) -> PreTrainedModel:
    """Return the model of a file as the engine loads it, with eager attention."""
    config = config_of(GgufFile(path))
    made = CONFIG_MAPPING[config.pop("model_type")](**config)
    register_probe()
    model = load_weights(
        str(path), AutoModelForCausalLM, path.parent, config=made, dtype=torch.float32, trust_remote_code=False,
        ignore_mismatched_sizes=True,
    )  # fmt: skip
    model.set_attn_implementation("eager")
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    tokens = torch.randint(2, VOCABULARY_SIZE, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: torch.Tensor = model(tokens).logits[0]
    return found


def require_same_logits(read: PreTrainedModel, written: PreTrainedModel) -> None:
    expected = logits(written)
    torch.testing.assert_close(logits(read), expected, rtol=0, atol=1e-4 * float(expected.std()))
