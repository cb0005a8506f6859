"""Quantised copies of a tiny checkpoint in every published format that is read, written by the formats' descriptions.

A writer returns the tensors that stand for a weight, by the end of their names, and the numbers that they mean, which
are computed in float64 and rounded once. Packing is by loops over the places of a word, so that it shares nothing with
the reader.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LARGEST_FP8 = 448.0
GROUP = 16
#: Divides neither the width nor the MLP's width of a tiny model.
BLOCK = 48
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

_Written = tuple[dict[str, torch.Tensor], torch.Tensor]
_Writer = Callable[[torch.Tensor], _Written]


@dataclass(frozen=True)
class Form:
    """One published format."""

    settings: dict[str, Any]
    """`quantization_config` of the config.json."""
    write: _Writer
    others: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further tensors beside each weight, which change nothing."""

    @property
    def has_oracle(self) -> bool:
        """True if the package compressed-tensors reads it; it does not read groups in another order any more."""
        return self.settings["quant_method"] == "compressed-tensors" and "actorder" not in str(self.settings)


def write_quantised(plain: Path, directory: Path, form: Form) -> dict[str, torch.Tensor]:
    """Write a copy of a checkpoint whose projections are quantised, and return all weights as they are meant."""
    shutil.copytree(plain, directory)
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": form.settings}
    (directory / "config.json").write_text(json.dumps(config))
    stored, meant = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if "_proj" in name or ".experts." in name:
            base = name.removesuffix(".weight")
            del stored[name]
            parts, meant[name] = form.write(weight)
            stored |= {f"{base}.{end}": part.clone().contiguous() for end, part in (parts | form.others).items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return meant


def write_meant(plain: Path, directory: Path, meant: dict[str, torch.Tensor]) -> Path:
    """Write a copy of a checkpoint with other weights."""
    shutil.copytree(plain, directory)
    save_file(meant, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def words(integers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack consecutive columns into words of 32 bits; the lowest bits have the column `order` names first."""
    per_word = 32 // bits
    rows, columns = integers.shape
    padded = torch.zeros(rows, -(-columns // per_word) * per_word, dtype=torch.int64)
    padded[:, :columns] = integers
    packed = torch.zeros(rows, padded.shape[1] // per_word, dtype=torch.int64)
    for place, column in enumerate(order or range(per_word)):
        packed |= padded[:, column::per_word] << (bits * place)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def means(
    integers: torch.Tensor, zero_points: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """Return (integer - zero point) * scale, with the group of each column."""
    differences = integers.double() - zero_points.double()[:, groups]
    return (differences * scales.double()[:, groups]).float()


def _rounded(weight: torch.Tensor, bits: int, scale_dtype: torch.dtype, *, signed: bool, groups: torch.Tensor) -> Any:
    """Return unsigned integers, zero points and scales [rows, groups] of a weight."""
    most, num_groups = (1 << bits) - 1, int(groups.max()) + 1
    parts = [weight[:, groups == group] for group in range(num_groups)]
    least = torch.stack([part.amin(1) for part in parts], 1)
    largest = torch.stack([part.amax(1) for part in parts], 1)
    if signed:
        largest = torch.maximum(largest, -least)
        least = -largest
    scales = ((largest - least) / most).to(scale_dtype)
    middle = torch.full(scales.shape, (most + 1) // 2)
    zero_points = middle if signed else (-least / scales.float()).round().clamp(0, most).long()
    steps = weight / scales.float()[:, groups] + zero_points[:, groups]
    return steps.round().clamp(0, most).long(), zero_points, scales


def _in_order(columns: int, size: int) -> torch.Tensor:
    return torch.arange(columns) // size


def _fp8(rows: int, columns: int, end: str, scale_dtype: torch.dtype = torch.float32) -> _Writer:
    def write(weight: torch.Tensor) -> _Written:
        block_rows, block_columns = rows or len(weight), columns or weight.shape[1]
        shape = -(-len(weight) // block_rows), -(-weight.shape[1] // block_columns)
        scales, wide = torch.empty(shape), torch.empty_like(weight)
        for row in range(shape[0]):
            for column in range(shape[1]):
                at = (
                    slice(row * block_rows, (row + 1) * block_rows),
                    slice(column * block_columns, (column + 1) * block_columns),
                )
                scales[row, column] = weight[at].abs().max() / LARGEST_FP8
                scales[row, column] = scales[row, column].to(scale_dtype).float()
                wide[at] = scales[row, column]
        numbers = (weight / wide).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
        stored = scales.to(scale_dtype) if rows or columns else scales.to(scale_dtype).reshape(())
        return {"weight": numbers, end: stored}, (numbers.double() * wide.double()).float()

    return write


def _exponents(weight: torch.Tensor) -> _Written:
    """Write one power of two a block, as its exponent in a byte."""
    parts, meant = _fp8(BLOCK, BLOCK, "weight_scale_inv", torch.float8_e8m0fnu)(weight)
    return parts | {"weight_scale_inv": parts["weight_scale_inv"].view(torch.uint8)}, meant


def _int8(scale_dtype: torch.dtype, *, signed: bool) -> _Writer:
    def write(weight: torch.Tensor) -> _Written:
        groups = _in_order(weight.shape[1], weight.shape[1])
        integers, zero_points, scales = _rounded(weight, 8, scale_dtype, signed=signed, groups=groups)
        parts = {"weight": (integers - 128).to(torch.int8), "weight_scale": scales}
        if not signed:
            parts["weight_zero_point"] = (zero_points - 128).to(torch.int8)
        return parts, means(integers, zero_points, scales, groups)

    return write


def _packed(bits: int, size: int, *, signed: bool, is_shuffled: bool = False) -> _Writer:
    def write(weight: torch.Tensor) -> _Written:
        columns = weight.shape[1]
        groups = _in_order(columns, size or columns)
        if is_shuffled:
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        integers, zero_points, scales = _rounded(weight, bits, torch.bfloat16, signed=signed, groups=groups)
        parts = {
            "weight_packed": words(integers, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape),
        }  # fmt: skip
        if not signed:
            parts["weight_zero_point"] = words(zero_points.T, bits).T
        if is_shuffled:
            parts["weight_g_idx"] = groups.int()
        return parts, means(integers, zero_points, scales, groups)

    return write


def _awq(weight: torch.Tensor) -> _Written:
    groups = _in_order(weight.shape[1], GROUP)
    integers, zero_points, scales = _rounded(weight, 4, torch.float16, signed=False, groups=groups)
    parts = {
        "qweight": words(integers.T, 4, _AWQ_ORDER), "qzeros": words(zero_points.T, 4, _AWQ_ORDER), "scales": scales.T
    }  # fmt: skip
    return parts, means(integers, zero_points, scales, groups)


def _gptq(bits: int, *, signed: bool, less: int, is_shuffled: bool, has_groups: bool = True) -> _Writer:
    """`less`: what is subtracted from each zero point before it is stored."""

    def write(weight: torch.Tensor) -> _Written:
        columns = weight.shape[1]
        groups = _in_order(columns, GROUP)
        if is_shuffled:
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        integers, zero_points, scales = _rounded(weight, bits, torch.float16, signed=signed, groups=groups)
        zero_points = zero_points.clamp(min=less)
        parts = {
            "qweight": words(integers, bits).T, "qzeros": words(zero_points.T - less, bits), "scales": scales.T,
        }  # fmt: skip
        if has_groups:
            parts["g_idx"] = groups.int()
        return parts, means(integers, zero_points, scales, groups)

    return write


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}


def fp8_blocks(size: int) -> Form:
    """Return the form of DeepSeek and Qwen, with square blocks."""
    return Form(_FP8 | {"weight_block_size": [size, size]}, _fp8(size, size, "weight_scale_inv"))


FORMS: dict[str, Form] = {
    "fp8 in blocks": fp8_blocks(BLOCK),
    "fp8 in blocks, powers of two": Form(
        _FP8 | {"weight_block_size": [BLOCK, BLOCK], "scale_fmt": "ue8m0"},
        _fp8(BLOCK, BLOCK, "weight_scale_inv", torch.float8_e8m0fnu),
    ),
    "fp8 in blocks, exponents": Form(_FP8 | {"weight_block_size": [BLOCK, BLOCK]}, _exponents),
    "fp8, one scale": Form(
        _FP8 | {"activation_scheme": "static"}, _fp8(0, 0, "weight_scale"), {"input_scale": torch.tensor(0.5)}
    ),
    "fp8, one scale a row": Form({"quant_method": "fbgemm_fp8"}, _fp8(1, 0, "weight_scale")),
    "float-quantized": Form(
        _compressed(
            "float-quantized",
            _INT8 | {"type": "float"},
            {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        ),
        _fp8(1, 0, "weight_scale", torch.bfloat16),
    ),
    "float-quantized in blocks": Form(
        _compressed(
            "float-quantized", _INT8 | {"type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK]}
        ),
        _fp8(BLOCK, BLOCK, "weight_scale"),
    ),
    "int-quantized": Form(
        _compressed("int-quantized", _INT8, {"num_bits": 8, "strategy": "token", "dynamic": True}),
        _int8(torch.float32, signed=True),
    ),
    "int-quantized with zero points": Form(
        _compressed("int-quantized", _INT8 | {"symmetric": False}), _int8(torch.bfloat16, signed=False)
    ),
    "pack-quantized": Form(_compressed("pack-quantized", _INT4), _packed(4, GROUP, signed=True)),
    "pack-quantized with zero points": Form(
        _compressed("pack-quantized", _INT4 | {"symmetric": False}), _packed(4, GROUP, signed=False)
    ),
    "pack-quantized, shuffled": Form(
        _compressed("pack-quantized", _INT4 | {"actorder": "group"}),
        _packed(4, GROUP, signed=True, is_shuffled=True),
    ),
    "pack-quantized, 8 bits a row": Form(_compressed("pack-quantized", _INT8), _packed(8, 0, signed=True)),
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, _awq),
    "gptq": Form(_GPTQ, _gptq(4, signed=True, less=1, is_shuffled=False)),
    "gptq without g_idx": Form(_GPTQ, _gptq(4, signed=True, less=1, is_shuffled=False, has_groups=False)),
    "gptq, shuffled": Form(_GPTQ | {"desc_act": True}, _gptq(4, signed=False, less=1, is_shuffled=True)),
    "gptq v2, 8 bits": Form(
        _GPTQ | {"bits": 8, "sym": False, "checkpoint_format": "gptq_v2"},
        _gptq(8, signed=False, less=0, is_shuffled=False),
    ),
    "gptq v2, 2 bits": Form(
        _GPTQ | {"bits": 2, "sym": False, "checkpoint_format": "gptq_v2"},
        _gptq(2, signed=False, less=0, is_shuffled=True),
    ),
}

#: As they are published: a tiny model is too narrow for these.
WIDE_FORMS: dict[str, Form] = {
    "pack-quantized": Form(_compressed("pack-quantized", _INT4 | {"group_size": 128}), _packed(4, 128, signed=True)),
}
