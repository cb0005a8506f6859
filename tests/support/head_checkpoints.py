"""Checkpoints of draft heads from random weights, in every format that is read.

Not trained: what a head says means nothing, but every number of it counts. Weights have the spread that makes every
part of the arithmetic show in the logits. Called by tests that need a head.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


def medusa_tensors(
    width: int, vocabulary_size: int, *, num_heads: int = 3, num_layers: int = 1, seed: int = 0
) -> Tensors:
    """Heads under the original names."""
    draw = _drawing(seed)
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = draw(width, width, gain=1.0)
            tensors[f"{head}.{layer}.linear.bias"] = draw(width, gain=1.0)
        tensors[f"{head}.{num_layers}.weight"] = draw(vocabulary_size, width, gain=3.0)
    return tensors


def as_vllm_medusa(tensors: Tensors) -> Tensors:
    """The same heads under vLLM's names."""
    num_layers = max(int(name.split(".")[1]) for name in tensors)
    renamed = {}
    for name, tensor in tensors.items():
        head, layer, *rest = name.split(".")
        is_logits = int(layer) == num_layers
        renamed[f"lm_heads.{head}.weight" if is_logits else f"blocks.{head}.layers.{layer}.{rest[-1]}"] = tensor
    return renamed


def write_medusa(directory: Path, tensors: Tensors, file: str = "medusa_lm_head.pt") -> Path:
    """Writes heads with the configuration that lies: uploaded ones say 5 heads whatever there is."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"medusa_num_heads": 5, "medusa_num_layers": 1}))
    _save(directory / file, tensors)
    return directory


#: Of a random EAGLE-3 head's own layers.
_EAGLE3_LAYER = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
}


def eagle3_config(target_width: int, vocabulary_size: int, draft_size: int, **layer: Any) -> dict[str, Any]:
    """The original, flat configuration; `layer` changes settings of it."""
    sizes = {"vocab_size": vocabulary_size, "draft_vocab_size": draft_size, "target_hidden_size": target_width}
    return {"architectures": ["LlamaForCausalLMEagle3"], **_EAGLE3_LAYER, **sizes, **layer}


def as_speculators(config: dict[str, Any], layer_ids: list[int] | None = None, **settings: Any) -> dict[str, Any]:
    """The same head's configuration as the `speculators` library nests it."""
    own = ("architectures", "draft_vocab_size", "target_hidden_size")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a target"}},
        "transformer_layer_config": {name: value for name, value in config.items() if name not in own},
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        "norm_before_residual": False,
        **settings,
    }


def eagle3_tensors(
    config: dict[str, Any], num_features: int = 3, *, seed: int = 0, extra_norms: bool = False
) -> Tensors:
    """A head under the original names, of a flat configuration, with its embeddings and its map of tokens."""
    draw = _drawing(seed)
    width, mlp, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    draft_size, vocabulary_size = config["draft_vocab_size"], config["vocab_size"]
    inputs = num_features * config["target_hidden_size"]
    tensors = {
        "fc.weight": draw(width, inputs, gain=1.0),
        "embed_tokens.weight": draw(vocabulary_size, width, gain=8.0),
        "lm_head.weight": draw(draft_size, width, gain=3.0),
        "norm.weight": 1 + draw(width, gain=0.8),
    }
    for layer in range(config["num_hidden_layers"]):
        name = "midlayer" if layer == 0 else f"layers.{layer}"
        fan_in = 2 * width if layer == 0 else width
        shapes = {
            "self_attn.q_proj": (heads, fan_in), "self_attn.k_proj": (kv, fan_in), "self_attn.v_proj": (kv, fan_in),
            "self_attn.o_proj": (width, heads), "mlp.gate_proj": (mlp, width), "mlp.up_proj": (mlp, width),
            "mlp.down_proj": (width, mlp),
        }  # fmt: skip
        tensors |= {f"{name}.{part}.weight": draw(*shape, gain=1.5) for part, shape in shapes.items()}
        norms = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if layer == 0 else ()))
        tensors |= {f"{name}.{part}.weight": 1 + draw(width, gain=0.8) for part in norms}
        if config["model_type"] == "qwen3":
            tensors |= {f"{name}.self_attn.{part}_norm.weight": 1 + draw(dim, gain=0.4) for part in "qk"}
    if extra_norms:
        tensors["input_norm.weight"] = 1 + draw(inputs, gain=0.8)
        per_layer = config["target_hidden_size"]
        tensors |= {f"fc_norm.{index}.weight": 1 + draw(per_layer, gain=0.8) for index in range(num_features)}
    if draft_size < vocabulary_size:
        shuffled = torch.randperm(vocabulary_size, generator=torch.Generator().manual_seed(seed))
        chosen = shuffled[:draft_size].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_size)
        tensors["t2d"] = torch.zeros(vocabulary_size, dtype=torch.bool).index_fill_(0, chosen, True)
    return tensors


def write_eagle3(directory: Path, config: dict[str, Any], tensors: Tensors, file: str = "model.safetensors") -> Path:
    """Writes a head; under `layers.0.*` where the configuration is that of `speculators`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if "speculators_model_type" in config:
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    _save(directory / file, tensors)
    return directory


def _save(file: Path, tensors: Tensors) -> None:
    if file.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    else:
        torch.save(tensors, file)


def _drawing(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, gain: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (gain / shape[-1] ** 0.5)

    return draw
