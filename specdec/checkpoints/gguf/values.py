"""Read the numbers of parameters from a GGUF file, and choose the dtype that holds all of them.

Called by `specdec.engine.model.gguf_state`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import numpy as np

from specdec.checkpoints.gguf.dequantise import Floats, dequantise
from specdec.checkpoints.gguf.file import KINDS
from specdec.checkpoints.gguf.weights import Weight

#: Numbers that are computed at once: 16 MB as float32.
_NUMBERS_AT_ONCE = 1 << 22
#: Dtypes that hold all numbers of tensors of a type. The first one is preferred.
_HELD = {"BF16": "bfloat16", "MXFP4": "bfloat16", "F16": "float16"}
_NARROW = ("bfloat16", "float16")


def chunks_of(weight: Weight, rows: range) -> Iterator[tuple[range, Floats]]:
    """Yield the numbers of rows of a weight, as they lie in the file: before rows and columns are swapped.

    Args:
        weight: the weight.
        rows: rows to read. A vector is one row here.

    Yields:
        the next rows, and float32 [rows, numbers of a row]
    """
    if _is_by_number(weight):
        numbers = _numbers(weight).reshape(-1, weight.shape[-1])[rows.start : rows.stop]
        yield rows, numbers + np.float32(weight.shift)
        return
    step = max(1, _NUMBERS_AT_ONCE // weight.stored_shape[-1])
    for start in range(rows.start, rows.stop, step):
        part = range(start, min(start + step, rows.stop))
        numbers = _rows(weight, part)
        yield part, numbers + np.float32(weight.shift) if weight.shift else numbers


def exact_dtype(weights: Iterable[Weight]) -> str:
    """Return the narrowest dtype that represents every number exactly: `bfloat16`, `float16` or `float32`."""
    left = list(_NARROW)
    for weight in sorted(weights, key=lambda weight: prod(weight.shape)):
        held = {_HELD.get(KINDS[part.kind].name) for part in weight.parts}
        own = held.pop() if len(held) == 1 and not weight.shift else None
        left = [own] if own is not None and own in left else [dtype for dtype in left if _holds(dtype, weight)]
        if not left:
            return "float32"
    return left[0]


def _holds(dtype: str, weight: Weight) -> bool:
    rows = range(prod(weight.stored_shape[:-1]))
    return all(_is_exact(dtype, numbers) for _, numbers in chunks_of(weight, rows))


def _is_exact(dtype: str, numbers: Floats) -> bool:
    if dtype == "bfloat16":
        return not np.any(np.ascontiguousarray(numbers).view(np.uint32) & 0xFFFF)
    with np.errstate(over="ignore"):
        return np.array_equal(numbers.astype(np.float16).astype(np.float32), numbers)


def _is_by_number(weight: Weight) -> bool:
    """Return whether rows are single numbers."""
    return len(weight.shape) == 1 or (weight.row_order is not None and len(weight.row_order) == prod(weight.shape))


def _numbers(weight: Weight) -> Floats:
    """Return all numbers of a weight whose rows are single numbers.  [N]"""
    numbers = np.concatenate([dequantise(part.data, part.kind).reshape(-1) for part in weight.parts])
    return numbers if weight.row_order is None else numbers[weight.row_order]


def _rows(weight: Weight, rows: range) -> Floats:
    """Return some rows.  [R, N]"""
    whole = weight.parts[0]
    if weight.row_order is None and len(weight.parts) == 1:
        return dequantise(whole.data[rows.start : rows.stop], whole.kind)
    index = np.arange(rows.start, rows.stop) if weight.row_order is None else weight.row_order[rows.start : rows.stop]
    numbers = np.empty((len(rows), weight.stored_shape[-1]), np.float32)
    first = 0
    for part in weight.parts:
        own = (index >= first) & (index < first + len(part.data))
        if own.any():
            numbers[own] = dequantise(part.data[index[own] - first], part.kind)
        first += len(part.data)
    return numbers
