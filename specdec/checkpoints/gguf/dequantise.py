"""Compute the numbers that the quantised blocks of a GGUF file stand for, as float32, exactly as llama.cpp does.

Types whose blocks index llama.cpp's tables of vectors are left to the package `gguf`, which is loaded for them alone.

Source: llama.cpp, `ggml-quants.c` (`dequantize_row_*`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.checkpoints.gguf.file import KINDS
from specdec.contract.errors import Unsupported
from specdec.contract.version import install_command

Bytes = NDArray[np.uint8]
Digits = NDArray[Any]
Floats = NDArray[np.float32]

#: Values of a digit of IQ4_NL and IQ4_XS, and of MXFP4, which is twice what it stands for.
_IQ4_VALUES = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32)
_MXFP4_VALUES = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.float32)
#: Blocks that are computed at once, so that what is in between stays in the processor's cache.
_BLOCKS_AT_ONCE = 4096


def dequantise(data: Bytes, kind: int) -> Floats:
    """Return the numbers of rows.

    Args:
        data: bytes of the rows.  [R, bytes of a row]
        kind: key of `KINDS`.

    Returns:
        float32 [R, numbers of a row]

    Raises:
        Unsupported: the type needs the package `gguf`, which is not installed.
    """
    name, num_weights, num_bytes = KINDS[kind]
    if name in _PLAIN:
        return _PLAIN[name](np.ascontiguousarray(data))
    compute = _QUANTISED.get(name) or _by_package(kind)
    blocks = np.ascontiguousarray(data).reshape(-1, num_bytes)
    numbers = np.empty((len(blocks), num_weights), np.float32)
    for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
        part = slice(start, start + _BLOCKS_AT_ONCE)
        numbers[part] = compute(blocks[part]).reshape(-1, num_weights)
    return numbers.reshape(len(data), -1)


def _by_package(kind: int) -> Callable[[Bytes], Floats]:
    if find_spec("gguf") is None:
        raise Unsupported(
            f"weights of type {KINDS[kind].name} need the package gguf, which this installation lacks: run "
            f"{install_command('gguf')}, or serve the model with --backend llama-cpp",
            field="model",
        )
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    def compute(blocks: Bytes) -> Floats:
        try:
            numbers: Floats = dequantize(blocks, GGMLQuantizationType(kind))
        except NotImplementedError as error:
            raise Unsupported(
                f"weights of type {KINDS[kind].name} are not supported: serve the model with --backend llama-cpp",
                field="model",
            ) from error
        return numbers

    return compute


def _bfloat16(data: Bytes) -> Floats:
    numbers: Floats = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return numbers


def _half(blocks: Bytes, at: int) -> Floats:
    """Return one half float of each block.  [N, 1]"""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Digits:
    """Return the low digits of bytes, followed by their high digits.  [..., B] -> [..., 2 B]"""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _fifth_bits(blocks: Bytes, at: int) -> Digits:
    """Return 32 bits of each block as 0 or 16.  [N, 32]"""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    digits = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (digits.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    digits = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * digits + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _mxfp4(blocks: Bytes) -> Floats:
    # The values are doubled, so the scale is half of 2 ** (exponent - 127).
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return scales.astype(np.float32) * _MXFP4_VALUES[_nibbles(blocks[:, 1:])]


def _iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _IQ4_VALUES[_nibbles(blocks[:, 2:])]


def _iq4_xs(blocks: Bytes) -> Floats:
    high = blocks[:, 2:4].copy().view(np.uint16)
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=-1).reshape(-1, 8)
    scales = low | ((high >> np.arange(0, 16, 2, dtype=np.uint16)) & 3).astype(np.uint8) << 4
    scale: Floats = _half(blocks, 0) * (scales.astype(np.float32) - 32)
    values: Floats = _IQ4_VALUES[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
    numbers: Floats = scale[..., None] * values
    return numbers


def _two_bits(packed: Bytes) -> Digits:
    """Return the four digits of two bits of bytes, lowest digits first.  [N, G, 32] -> [N, G * 4, 32]"""
    digits = packed[:, :, None, :] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return digits.reshape(len(packed), -1, 32)


def _q2_k(blocks: Bytes) -> Floats:
    scales = blocks[:, :16]
    digits = _two_bits(blocks[:, 16:80].reshape(-1, 2, 32)).reshape(-1, 16, 16)
    scale, least = _half(blocks, 80) * (scales & 15), _half(blocks, 82) * (scales >> 4)
    return scale[..., None] * digits - least[..., None]


def _q3_k(blocks: Bytes) -> Floats:
    low = _two_bits(blocks[:, 32:96].reshape(-1, 2, 32))  # [N, 8, 32]
    high = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    digits = (low | high << 2).astype(np.float32).reshape(-1, 16, 16) - 4
    packed = blocks[:, 96:108]
    upper = packed[:, None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3  # [N, 4, 4]
    scales = _nibbles(packed[:, :8]).reshape(-1, 16) | upper.reshape(-1, 16) << 4
    scale: Floats = _half(blocks, 108) * (scales.astype(np.float32) - 32)
    numbers: Floats = scale[..., None] * digits
    return numbers


def _six_bits(packed: Bytes) -> tuple[Digits, Digits]:
    """Return eight scales and eight minima of Q4_K and Q5_K.  [N, 12] -> 2 x [N, 8]"""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, (rest & 15) | (first >> 6) << 4), axis=1)
    minima = np.concatenate((second & 63, (rest >> 4) | (second >> 6) << 4), axis=1)
    return scales, minima


def _scaled_by_six_bits(blocks: Bytes, digits: Digits) -> Floats:
    scales, minima = _six_bits(blocks[:, 4:16])
    scale, least = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return scale[..., None] * digits - least[..., None]


def _q4_k(blocks: Bytes) -> Floats:
    return _scaled_by_six_bits(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _scaled_by_six_bits(blocks, low | high << 4)


def _q6_k(blocks: Bytes) -> Floats:
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array((0, 4), np.uint8)[:, None] & 15  # [N, 2, 2, 64]
    high = _two_bits(blocks[:, 128:192].reshape(-1, 2, 32))
    digits = (low.reshape(-1, 8, 32) | high << 4).astype(np.float32).reshape(-1, 16, 16) - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return scale[..., None] * digits


_PLAIN: dict[str, Callable[[Bytes], Floats]] = {
    "F32": lambda data: data.view(np.float32),
    "F16": lambda data: data.view(np.float16).astype(np.float32),
    "BF16": _bfloat16,
}
_QUANTISED: dict[str, Callable[[Bytes], Floats]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "MXFP4": _mxfp4, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
