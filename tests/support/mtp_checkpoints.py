"""Tiny random checkpoints whose model brings an MTP layer, with its weights where such checkpoints keep them.

Not trained. Called by the tests of MTP heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from tests.support.tiny_architectures import build_tiny_architecture

#: Types, with what their configuration needs. DeepSeek-V3's layer is the 62nd, GLM-4.5-Air's the 47th: Transformers
#: knows them by their number.
MTP_TYPES: dict[str, dict[str, Any]] = {
    "mellum": {"num_mtp_layers": 1, "layer_types": ["full_attention", "sliding_attention"]},
    "deepseek_v3": {"num_hidden_layers": 61},
    "glm4_moe": {"num_hidden_layers": 46},
}


def build_mtp_checkpoint(model_type: str, directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Writes one; its MTP layer is drawn so that all of it shows in the logits. `changes` are of its configuration."""
    model = build_tiny_architecture(model_type, directory, seed=seed, **MTP_TYPES[model_type], **changes)
    stored = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in MtpModel(model, 1).layers[0].state_dict().items():
        noise = torch.randn(parameter.shape, generator=generator)
        drawn = 1 + 0.1 * noise if parameter.ndim < 2 else noise * (1.5 / max(parameter.shape[-2:]) ** 0.5)
        stored[_stored_name(model_type, MTP_TYPES[model_type], name)] = drawn.to(parameter.dtype)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    return directory


def _stored_name(model_type: str, settings: dict[str, Any], name: str) -> str:
    """Return where a checkpoint keeps a parameter of the layer."""
    if model_type == "mellum":
        return f"mtp.layers.0.{name}"
    number = settings["num_hidden_layers"]
    return f"model.layers.{number}.{name.removeprefix('mtp_block.')}".replace("post_norm", "shared_head.norm")
