"""A quantised checkpoint that is damaged, or in a variant that is not read, is refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.checkpoints.model_size import model_size
from specdec.checkpoints.preflight import require_servable
from specdec.checkpoints.quantised.statement import read_quantisation
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.engine.loader import load_worker
from specdec.engine.options import LoadRequest
from tests.support.quantised_checkpoints import FORMS, Form, write_meant, write_quantised
from tests.support.tiny_models import build_tiny_model

Q = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("plain"), vocabulary_size=64, num_layers=1)


def without(end: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{Q}.{end}")


def with_tensor(end: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"{Q}.{end}": change(tensors[f"{Q}.{end}"]).contiguous()})


def with_more(end: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"{Q}.{end}": tensor})


@pytest.mark.parametrize(
    ("form", "damage", "tensor", "words"),
    [
        ("fp8 in blocks", without("weight_scale_inv"), "weight F8_E4M3 [64, 64]", "has no scales: neither"),
        ("fp8 in blocks", with_tensor("weight_scale_inv", lambda scales: scales[:1]), "weight_scale_inv F32 [1, 2]",
         "does not fit a weight of shape [64, 64], which needs [1, 1] or [64] or [64, 1] or [2, 2]"),
        ("fp8 in blocks", with_tensor("weight", lambda weight: weight.to(torch.int8)), "weight I8 [64, 64]",
         "holds int8; its config.json states fp8"),
        ("fp8 in blocks", with_tensor("weight", lambda weight: weight.to(torch.float8_e5m2)), "weight F8_E5M2",
         "must be F8_E4M3 or I8"),
        ("fp8 in blocks", with_tensor("weight", lambda weight: weight.float()), "weight_scale_inv F32",
         "belongs to no quantised weight"),
        ("fp8 in blocks", with_tensor("weight_scale_inv", lambda scales: scales.long()), "weight_scale_inv I64",
         "must be F32 or"),
        ("int-quantized with zero points", without("weight_zero_point"), "weight I8",
         f"config.json says symmetric: false: {Q}.weight_zero_point is missing"),
        ("pack-quantized", without("weight_shape"), "weight_packed I32", f"needs {Q}.weight_shape"),
        ("pack-quantized", without("weight_packed"), "weight_scale BF16", "belongs to no quantised weight"),
        ("pack-quantized", with_tensor("weight_packed", lambda packed: packed[:, :5]), "weight_packed I32 [64, 5]",
         "a row of 64 integers has 4 words with 2 bits or 8 words with 4 bits or 16 words with 8 bits"),
        ("pack-quantized", with_tensor("weight_shape", lambda shape: shape + 1), "weight_packed I32 [64, 8]",
         "which says [65, 65]"),
        ("pack-quantized", with_tensor("weight_scale", lambda scales: scales[:, :3]), "weight_scale BF16 [64, 3]",
         "which needs [1, 1] or [64] or [64, 1] or [64, 4]"),
        ("pack-quantized", with_more("weight_global_scale", torch.ones(1)), "weight_global_scale",
         "belongs to no quantised weight"),
        ("pack-quantized", with_more("weight", torch.ones(64, 64)), "weight_packed",
         f"stands for {Q}.weight, which is in the files as well"),
        ("pack-quantized with zero points", with_tensor("weight_zero_point", lambda zeros: zeros[:4]),
         "weight_zero_point I32 [4, 4]", "must have the shape [8, 4]"),
        ("awq", without("qzeros"), "qweight I32", f"needs {Q}.qzeros"),
        ("awq", with_tensor("scales", lambda scales: scales.T[:4]), "scales F16 [4, 4]", "must have the shape [4, 64]"),
        ("awq", with_tensor("qweight", lambda weight: weight[:60]), "qweight I32 [60, 8]",
         "has 60 inputs, which groups of 16 (group_size) do not divide"),
        ("awq", with_more("act.scales", torch.ones(64)), "act.scales F32", "belongs to no quantised weight"),
        ("gptq", with_tensor("qzeros", lambda zeros: zeros[:, :7]), "qzeros I32 [4, 7]",
         "a row of 64 integers has 4 words with 2 bits or 8 words with 4 bits or 16 words with 8 bits"),
        ("gptq", with_tensor("qzeros", lambda zeros: zeros[:0]), "qzeros I32 [0, 8]", "is empty"),
        ("fp8, one scale", with_tensor("weight", lambda weight: weight[:0]), "weight F8_E4M3 [0, 64]", "is empty"),
        ("gptq", with_tensor("g_idx", lambda groups: groups[1:]), "g_idx I32 [63]", "must have the shape [64]"),
        ("gptq", with_tensor("scales", lambda scales: scales[:, 0]), "scales F16 [4]", "must have two dimensions"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused_with_file_and_tensor(
    form: str, damage: Callable[[Tensors], object], tensor: str, words: str, plain: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    write_quantised(plain, model, FORMS[form])
    tensors = load_file(model / "model.safetensors")
    damage(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidRequest) as refusal:
        require_servable(str(model), flag="--target")
    message = refusal.value.message
    assert message.startswith(
        f"--target: model {str(model)!r} is quantised with {FORMS[form].settings['quant_method']}"
    )
    assert f"model.safetensors does not fit that: tensor {Q}.{tensor}" in message
    assert words in message


def grouped(**values: Any) -> dict[str, Any]:
    """Return settings of compressed-tensors with changes; those of its one group's weights are `weights`."""
    settings = dict(FORMS["pack-quantized"].settings)
    group = dict(settings["config_groups"]["group_0"])
    group["weights"] = group["weights"] | values.pop("weights", {})
    return settings | {"config_groups": {"group_0": group | values.pop("group", {})}} | values


AWQ, GPTQ = FORMS["awq"].settings, FORMS["gptq"].settings
FP8 = FORMS["fp8 in blocks"].settings


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, Unsupported, "quantised with bitsandbytes; the own"),
        ({"quant_method": "of-next-year"}, Unsupported, "is quantised with of-next-year"),
        ({"quant_method": ["awq"]}, Unsupported, "is quantised with ['awq']"),
        ({}, Unsupported, "is quantised with None"),
        ([4], Unsupported, "is quantised with None"),
        (AWQ | {"version": "gemv"}, Unsupported, "has version gemv; the own engine reads gemm"),
        (AWQ | {"bits": 3}, Unsupported, "has bits 3; the own engine reads 4"),
        (AWQ | {"zero_point": False}, Unsupported, "has zero_point False"),
        (AWQ | {"group_size": 0}, InvalidRequest, "quantization_config.group_size 0, which must be a whole number"),
        (GPTQ | {"bits": 3}, Unsupported, "has bits 3; the own engine reads 2 or 4 or 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, Unsupported, "has checkpoint_format marlin"),
        (GPTQ | {"is_marlin_format": True}, Unsupported, "has is_marlin_format True"),
        (FP8 | {"weight_block_size": [128, 0]}, InvalidRequest, "must be two whole numbers, such as [128, 128]"),
        (FP8 | {"fmt": "e5m2"}, Unsupported, "has fmt e5m2"),
        (grouped(format="nvfp4-pack-quantized"), Unsupported, "has format nvfp4-pack-quantized"),
        (grouped(group={"format": "marlin-24"}), Unsupported, "has config_groups.group_0.format marlin-24"),
        (grouped(weights={"num_bits": 3}), Unsupported, "has config_groups.group_0.weights.num_bits 3"),
        (grouped(weights={"type": "float"}), Unsupported, "weights.num_bits 4; the own engine reads 8"),
        (grouped(sparsity_config={"format": "sparse-24-bitmask"}), Unsupported, "sparsity_config.format sparse-24"),
        (grouped(transform_config={"config_groups": {"R4": {}}}), Unsupported, "no rotations of activations"),
        (grouped(config_groups={}), InvalidRequest, "config_groups None, which must be an object with at least one"),
        (grouped(config_groups={"W8A8": ["Linear"]}), InvalidRequest, "config_groups.W8A8 ['Linear'], which must be"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(settings: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as refusal:
        read_quantisation("some/model", settings)
    assert words in str(refusal.value)
    assert error is InvalidRequest or str(refusal.value).endswith("start specdec with --backend vllm --backend-url URL")


@pytest.mark.parametrize("form", ["fp8 in blocks", "awq", "gptq, shuffled", "pack-quantized with zero points"])
def test_a_quantised_checkpoint_has_as_many_weights_as_a_plain_one(form: str, plain: Path, tmp_path: Path) -> None:
    write_quantised(plain, tmp_path / "quantised", FORMS[form])
    assert model_size(str(tmp_path / "quantised")) == model_size(str(plain))


@pytest.mark.parametrize("form", ["fp8 in blocks", "gptq", "pack-quantized"])
def test_quantised_weights_without_a_statement_are_refused(form: str, plain: Path, tmp_path: Path) -> None:
    """An earlier version took the numbers of FP8 for plain weights then."""
    write_quantised(plain, tmp_path / "model", FORMS[form])
    (tmp_path / "model" / "config.json").write_bytes((plain / "config.json").read_bytes())
    with pytest.raises(InvalidRequest, match=r"of a quantised weight in model.safetensors, and its config.json has no"):
        require_servable(str(tmp_path / "model"), flag="--target")
    with pytest.raises(InvalidRequest, match=r"of a quantised weight in model.safetensors, and its config.json has no"):
        load_worker(LoadRequest(str(tmp_path / "model"), device="cpu", dtype="float32"))


def test_plain_weights_under_a_statement_of_quantisation_are_plain(plain: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_quantised(plain, model, Form(FP8, FORMS["fp8 in blocks"].write))
    write_meant(model, tmp_path / "plain", load_file(plain / "model.safetensors"))
    require_servable(str(tmp_path / "plain"), flag="--target")
