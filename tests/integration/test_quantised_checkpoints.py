"""Checkpoints with quantised weights: read as the numbers they represent, or refused by their method's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.contract.errors import Unsupported
from specdec.engine.base import SequenceSlice, StepPlan
from specdec.engine.loader import load_worker
from specdec.engine.options import LoadRequest
from tests.support.tiny_models import build_tiny_model

BLOCK = 16
LARGEST_FP8 = 448.0


def with_quantisation(directory: Path, settings: dict[str, Any]) -> Path:
    build_tiny_model("llama", directory, vocabulary_size=64)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return directory


def logits_of(model: Path) -> torch.Tensor:
    worker = load_worker(LoadRequest(str(model), device="cpu", dtype="float32", num_kv_blocks=4))
    return worker.execute(StepPlan((SequenceSlice(tuple(range(2, 22)), 0, (0, 1, 2, 3), 20),)))


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "not_heard_of"])
def test_an_unsupported_quantisation_method_is_refused_by_name(method: str, tmp_path: Path) -> None:
    """An earlier version loaded the last of these as if its numbers were plain weights."""
    model = with_quantisation(tmp_path, {"quant_method": method, "bits": 4, "group_size": 32})
    with pytest.raises(Unsupported, match=f"is quantised with {method}; only fp8 and mxfp4"):
        load_worker(LoadRequest(str(model), device="cpu", dtype="float32"))


def test_fp8_weights_are_loaded_as_the_numbers_they_represent(tmp_path: Path) -> None:
    plain = build_tiny_model("llama", tmp_path / "plain", vocabulary_size=64)
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    quantised = with_quantisation(tmp_path / "fp8", settings)
    stored, meant = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if "proj" in name:
            blocks = weight.reshape(weight.shape[0] // BLOCK, BLOCK, weight.shape[1] // BLOCK, BLOCK)
            scales = blocks.abs().amax((1, 3)) / LARGEST_FP8
            eighth = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            stored[name], stored[f"{name}_scale_inv"] = eighth.reshape(weight.shape), scales
            meant[name] = (eighth.float() * scales[:, None, :, None]).reshape(weight.shape)
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    before = logits_of(plain)
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of(quantised), logits_of(plain))
    assert not torch.equal(before, logits_of(plain))
