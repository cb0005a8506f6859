"""Read and check the `quantization_config` of a config.json.

A `Quantisation` says which number formats a checkpoint's weights may have; `stored_weights` finds them in its files. A
method or variant that is not read is refused here by name, before any file of weights is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Never

from specdec.checkpoints.counts import MOST, is_count
from specdec.contract.errors import InvalidRequest, Unsupported

#: What serves a checkpoint that is refused here.
_ELSEWHERE = "serve it with vLLM and start specdec with --backend vllm --backend-url URL"

_PACKED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
#: Bits of integers that fill 32-bit words without remainder.
WORD_BITS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """One way in which a checkpoint may store numbers."""

    is_float: bool
    bits: int
    block: tuple[int, int] | None = None
    """Rows and columns of a weight that share a scale; None if a row or the whole weight shares one."""
    has_zero_points: bool = False
    """True if integers count from a stored zero point, which differs from scale to scale."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A checked `quantization_config`."""

    method: str
    formats: tuple[NumberFormat, ...]
    zero_point_shift: int = 0
    """Number to add to each stored zero point."""
    rounded_activations: str = ""
    """Number formats to which the configuration says that activations are rounded at run time; "" for none."""


def read_quantisation(model: str, settings: object) -> Quantisation | None:
    """Return what a `quantization_config` states; None if it is None.

    Args:
        model: name of the checkpoint, as the user gave it.
        settings: content of the key.

    Raises:
        Unsupported: the own engine does not read this method, or this variant of it.
        InvalidRequest: a value is damaged.
    """
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise Unsupported(
            f"model {model!r} is quantised with {str(method)[:64]}; the own engine reads {', '.join(METHODS)} "
            f"and GGUF files: {_ELSEWHERE}"
        )
    assert isinstance(settings, dict)  # otherwise there is no reader
    return reader(_Settings(model, str(method), settings))


class _Settings:
    """Values of a `quantization_config` or of a part of it, with the model's name for messages."""

    def __init__(self, model: str, method: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self.method = method
        self._model, self._values, self._prefix = model, values, prefix

    def get(self, *keys: str, default: Any = None) -> Any:
        """Return the value of the first of several spellings that is present and not null."""
        return next((value for key in keys if (value := self._values.get(key)) is not None), default)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, self._values))

    def refuse(self, key: str, value: object, readable: str) -> Never:
        """Refuse a variant that others read."""
        raise Unsupported(
            f"model {self._model!r} is quantised with {self.method} and has {self._prefix}{key} {str(value)[:60]}; the "
            f"own engine reads {readable}: {_ELSEWHERE}"
        )

    def damaged(self, key: str, value: object, expected: str) -> Never:
        raise InvalidRequest(
            f"model {self._model!r} has quantization_config.{self._prefix}{key} {str(value)[:60]}, which must be "
            f"{expected}",
            field="model",
        )

    def require(self, key: str, value: object, readable: tuple[Any, ...]) -> None:
        """Refuse a value that is not among the readable ones."""
        if value not in readable:
            self.refuse(key, value, " or ".join(str(each) for each in readable))

    def part(self, key: str) -> _Settings:
        """Return the settings of an object among the values; an absent one is empty."""
        value = self.get(key, default={})
        if not isinstance(value, dict):
            self.damaged(key, value, "an object")
        return _Settings(self._model, self.method, value, f"{self._prefix}{key}.")

    def block(self, key: str) -> tuple[int, int] | None:
        """Return the rows and columns of a block, such as [128, 128]."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(is_count(side, 1, MOST) for side in value):
            self.damaged(key, value, "two whole numbers, such as [128, 128]")
        return value[0], value[1]

    def group(self, *keys: str) -> tuple[int, int] | None:
        """Return the block of a row's consecutive columns that share a scale; None if the whole row does."""
        size = self.get(*keys, default=-1)
        if size == -1:
            return None
        if not is_count(size, 1, MOST):
            self.damaged(keys[0], size, "a whole number, or -1 for one scale a row")
        return 1, size


def _fp8(settings: _Settings) -> Quantisation:
    settings.require("fmt", settings.get("fmt", default="e4m3"), ("e4m3",))
    return Quantisation(
        settings.method, (NumberFormat(True, 8, settings.block("weight_block_size")),), rounded_activations="fp8"
    )


def _awq(settings: _Settings) -> Quantisation:
    for key in ("version", "format"):
        settings.require(key, str(settings.get(key, default="gemm")).lower(), ("gemm",))
    settings.require("bits", settings.get("bits", "w_bit", default=4), (4,))
    settings.require("zero_point", settings.get("zero_point", default=True), (True,))
    return Quantisation(settings.method, (NumberFormat(False, 4, settings.group("group_size", "q_group_size"), True),))


def _gptq(settings: _Settings) -> Quantisation:
    layout = settings.get("checkpoint_format", "format", default="gptq")
    settings.require("checkpoint_format", layout, ("gptq", "gptq_v2"))
    settings.require("is_marlin_format", bool(settings.get("is_marlin_format", default=False)), (False,))
    settings.require("pack_dtype", settings.get("pack_dtype", default="int32"), ("int32",))
    settings.require("bits", settings.get("bits"), WORD_BITS)
    # Some weights may have other bits (`dynamic`); what is stored tells them.
    formats = tuple(NumberFormat(False, bits, settings.group("group_size"), True) for bits in WORD_BITS)
    return Quantisation(settings.method, formats, zero_point_shift=1 if layout == "gptq" else 0)


def _mxfp4(settings: _Settings) -> Quantisation:
    return Quantisation(settings.method, (NumberFormat(True, 4, (1, 32)),))


def _compressed_tensors(settings: _Settings) -> Quantisation:
    settings.require("format", settings.get("format", default="pack-quantized"), _PACKED_FORMATS)
    if transforms := settings.part("transform_config").get("config_groups"):
        settings.refuse("transform_config", transforms, "no rotations of activations")
    sparsity = settings.part("sparsity_config")
    sparsity.require("format", sparsity.get("format", default="dense"), ("dense",))
    groups = settings.part("config_groups")
    if not groups.names:
        settings.damaged("config_groups", None, "an object with at least one group")
    schemes = [groups.part(name) for name in groups.names]
    for scheme in schemes:
        scheme.require("format", scheme.get("format", default="pack-quantized"), _PACKED_FORMATS)
    rounded = [
        _number_name(scheme.part(key))
        for scheme in schemes
        for key in ("input_activations", "output_activations")
        if scheme.get(key) is not None
    ]
    if settings.get("kv_cache_scheme") is not None:
        rounded.append(f"{_number_name(settings.part('kv_cache_scheme'))} in the KV cache")
    return Quantisation(
        settings.method,
        tuple(_weight_format(scheme.part("weights")) for scheme in schemes if scheme.get("weights") is not None),
        rounded_activations=" and ".join(dict.fromkeys(rounded)),
    )


def _weight_format(settings: _Settings) -> NumberFormat:
    kind, bits = str(settings.get("type", default="int")).lower(), settings.get("num_bits", default=8)
    settings.require("type", kind, ("int", "float"))
    settings.require("num_bits", bits, WORD_BITS if kind == "int" else (8,))
    block = settings.block("block_structure") if settings.get("strategy") == "block" else settings.group("group_size")
    return NumberFormat(kind == "float", int(bits), block, not settings.get("symmetric", default=True))


def _number_name(settings: _Settings) -> str:
    kind, bits = settings.get("type", default="int"), settings.get("num_bits", default=8)
    return f"{'fp' if kind == 'float' else 'int'}{bits}"


_READERS: Mapping[str, Callable[[_Settings], Quantisation]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}

#: Values of `quant_method` that are read.
METHODS = tuple(_READERS)
