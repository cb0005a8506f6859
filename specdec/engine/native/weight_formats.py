"""The shortest format that holds a weight matrix exactly, and packing into panels in that format.

The format is found by conversion and comparison, not from the checkpoint's metadata. Weights that were stored in 16
bits or in llama.cpp's Q4_1 or Q8_0 and then converted to float32 go back to their stored format. Signed integers of 4
and 8 bits of published checkpoints and those of Q6_K keep their scales. The kernels restore the same float32 numbers.
`layout.h` describes the formats (`Format` and `Product`). Called by `packing`.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import torch


class Format(IntEnum):
    """`Format` of `layout.h`."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3
    SCALED4 = 4
    SCALED8 = 5
    FINE8 = 6
    SCALED5 = 7
    SUPER4 = 8
    SUPER5 = 9
    SUPER6 = 10


FORMAT_OF = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16, torch.float16: Format.FLOAT16}

#: Number of consecutive inputs of an output that share a scale and an offset; `SHARED` in `layout.h`.
SHARED = 32
#: The same for fine scales, without offsets; `FINE` in `layout.h`.
FINE = 16
#: Largest magnitudes of a group's integers, those of Q6_K and Q5_0 first.
_FINE_STEPS = (*range(32, 0, -1), *range(33, 129))
#: Largest magnitudes of signed integers of 4 and of 8 bits.
_MOST4, _MOST8 = 8, 128
#: Number of rows whose fine scales are sought at a time: it takes several copies of them.
_FINE_AT_ONCE = 4096

#: Number of rows that are tried first: if a format does not fit, these rows mostly show it.
_FIRST_ROWS = 4
#: Number of a group's inputs that are tried first, and the distance to an integer that rounding explains at most.
_FIRST_INPUTS, _NEAR = 4, 1e-3


class Scaled(NamedTuple):
    """Integers with scales and offsets, of a matrix of `outputs` times `inputs` weights."""

    integers: torch.Tensor
    """uint8 or int8 [outputs, inputs / SHARED, SHARED]."""
    scales: torch.Tensor
    """float16 [outputs, inputs / SHARED]."""
    offsets: torch.Tensor
    """float16 [outputs, inputs / SHARED]."""

    @property
    def weight(self) -> torch.Tensor:
        """float32 [outputs, inputs]. The product is exact, so this rounds once, as the kernels do."""
        scales, offsets = (part.float().unsqueeze(-1) for part in (self.scales, self.offsets))
        return (self.integers.float() * scales + offsets).flatten(1)


def halved(weight: torch.Tensor) -> torch.Tensor:
    """Return the weights in 16 bits if one of the 16-bit formats holds all of them exactly, else `weight` itself."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(part.to(dtype).float(), part) for part in _from_small(weight)):
            return weight.to(dtype)
    return weight


def pack_shortest(weight: torch.Tensor, panel: int) -> tuple[Format, torch.Tensor]:
    """Return the shortest format and the weights packed in it.

    Args:
        weight: float32 [whole panels of outputs, inputs].
        panel: outputs per panel.
    """
    if weight.shape[1] % SHARED == 0:
        for format_, scale in ((Format.SCALED4, _scale4), (Format.SCALED8, _scale8)):
            if all(torch.equal(scale(part).weight, part) for part in _from_small(weight)):
                return format_, _pack_scaled(scale(weight), panel, format_)
        for format_, most in ((Format.SCALED4, _MOST4), (Format.SCALED8, _MOST8)):
            if (scaled := _signed(weight, most)) is not None:
                return format_, _pack_scaled(scaled, panel, format_)
    if weight.shape[1] % FINE == 0 and (fine := _grouped(weight, FINE, _FINE_STEPS, torch.float32)) is not None:
        return Format.FINE8, _pack_fine(*fine, panel)
    return pack(halved(weight), panel)


def pack(weight: torch.Tensor, panel: int) -> tuple[Format, torch.Tensor]:
    """Return the format and panels of the weights in their own dtype; see `layout.h`."""
    packed = weight.view(-1, panel, weight.shape[1]).transpose(1, 2)
    if weight.dtype == torch.bfloat16:
        packed = packed.unflatten(-1, (2, panel // 2)).transpose(-1, -2).flatten(-2)
    return FORMAT_OF[weight.dtype], packed


def _from_small(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a few rows, then all rows, for trying a format."""
    return weight[:_FIRST_ROWS], weight


def _scale4(weight: torch.Tensor) -> Scaled:
    """Quantise as Q4_1: 15 steps from the smallest to the largest number of a group."""
    groups = weight.view(len(weight), -1, SHARED)
    offsets = groups.amin(-1).half()
    scales = ((groups.amax(-1) - groups.amin(-1)) / 15).half()
    return _rounded(groups, scales, offsets, 0, 15, torch.uint8)


def _scale8(weight: torch.Tensor) -> Scaled:
    """Quantise as Q8_0: 127 steps from 0 to the largest magnitude of a group."""
    groups = weight.view(len(weight), -1, SHARED)
    scales = (groups.abs().amax(-1) / 127).half()
    return _rounded(groups, scales, torch.zeros_like(scales), -127, 127, torch.int8)


def _rounded(
    groups: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, least: int, most: int, dtype: torch.dtype
) -> Scaled:
    steps = (groups - offsets.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)
    # A scale of 0 gives NaN: all numbers of the group then equal the offset.
    return Scaled(steps.nan_to_num_(0.0).round_().clamp_(least, most).to(dtype), scales, offsets)


def _signed(weight: torch.Tensor, most: int) -> Scaled | None:
    """Return the weight as integers from `-most` to `most - 1` with a scale in float16, or None unless that is exact.

    Integers of 4 bits are stored unsigned, with minus eight times the scale as the offset.
    """
    found = _grouped(weight, SHARED, tuple(range(most, 0, -1)), torch.float16)
    if found is None:
        return None
    integers, scales = found[0], found[1].half()
    if most == _MOST8:
        return Scaled(integers, scales, torch.zeros_like(scales))
    offsets = -_MOST4 * scales
    return Scaled((integers + _MOST4).to(torch.uint8), scales, offsets) if bool(offsets.isfinite().all()) else None


def _grouped(
    weight: torch.Tensor, size: int, steps: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the weight as integers whose scale `size` consecutive inputs share, or None unless that is exact.

    Args:
        weight: float32 [outputs, inputs].
        size: divides the inputs.
        steps: magnitudes that the largest integer of a group may have, in the order in which they are tried.
        dtype: dtype that holds the scales.

    Returns:
        int8 [outputs, inputs / size, size] and float32 [outputs, inputs / size].
    """
    if _grouped_rows(weight[:_FIRST_ROWS], size, steps, dtype) is None:
        return None
    parts = []
    for rows in weight.split(_FINE_AT_ONCE):
        if (part := _grouped_rows(rows, size, steps, dtype)) is None:
            return None
        parts.append(part)
    integers, scales = map(torch.cat, zip(*parts, strict=True))
    return integers, scales


def _grouped_rows(
    weight: torch.Tensor, size: int, steps: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what `_grouped` does, for a few rows.

    A group's largest number is its scale times an integer that is not known, so every integer is tried: on a few of the
    group's numbers, and on all of them if those are near integers.
    """
    groups = weight.reshape(-1, size)
    largest_numbers = groups.abs().amax(-1)
    integers, scales = torch.zeros(groups.shape, dtype=torch.int8), torch.zeros(len(groups))
    left = largest_numbers.nonzero().squeeze(-1)  # a group of zeros has the scale 0
    first = groups[left, :_FIRST_INPUTS]
    for step in steps:
        counted = first * (step / largest_numbers[left]).unsqueeze(-1)
        near = ((counted - counted.round()).abs() < _NEAR).all(-1)
        found = torch.zeros_like(near)
        found[near] = _fill(groups, left[near], largest_numbers[left[near]] / step, integers, scales, max(steps), dtype)
        left, first = left[~found], first[~found]
        if not len(left):
            return integers.view(len(weight), -1, size), scales.view(len(weight), -1)
    return None


def _fill(
    groups: torch.Tensor, rows: torch.Tensor, quotients: torch.Tensor, integers: torch.Tensor, scales: torch.Tensor,
    most: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Write integers and scale of the rows of `groups` that are exact multiples of a scale; return which are.

    The scale is the row's quotient. If the products were rounded, it may be the number next to it.
    """
    is_found = torch.zeros(len(rows), dtype=torch.bool)
    for neighbour in (0.0, math.inf, -math.inf) if dtype == torch.float32 else (0.0,):
        scale = (torch.nextafter(quotients, torch.tensor(neighbour)) if neighbour else quotients).to(dtype).float()
        tried = groups[rows]
        counted = (tried / scale.unsqueeze(-1)).round()
        fits = (counted * scale.unsqueeze(-1) == tried).all(-1) & ~is_found
        fits &= ((counted >= -most) & (counted < most)).all(-1)  # a scale that was rounded may ask for more
        integers[rows[fits]], scales[rows[fits]] = counted[fits].to(torch.int8), scale[fits]
        is_found |= fits
    return is_found


def _pack_fine(integers: torch.Tensor, scales: torch.Tensor, panel: int) -> torch.Tensor:
    """Return the packed bytes, uint8 [panels, groups, bytes of a group]; see `layout.h`."""
    outputs, groups, _ = integers.shape
    shared = scales.view(-1, panel, groups).transpose(1, 2).contiguous().view(torch.uint8)
    rows = integers.view(-1, panel, groups, FINE).permute(0, 2, 3, 1).contiguous().view(torch.uint8)
    return torch.cat((shared, rows.view(outputs // panel, groups, -1)), dim=-1)


def _pack_scaled(scaled: Scaled, panel: int, format_: Format) -> torch.Tensor:
    """Return the packed bytes, uint8 [panels, groups, bytes of a group]; see `layout.h`."""
    outputs, groups, _ = scaled.integers.shape
    shared = [part.view(-1, panel, groups).transpose(1, 2).contiguous().view(torch.uint8) for part in scaled[1:]]
    integers = scaled.integers.view(-1, panel, groups, SHARED).permute(0, 2, 3, 1)  # [panels, groups, SHARED, panel]
    if format_ is Format.SCALED4:
        low, high = integers.split(panel // 2, dim=-1)
        integers = low | (high << 4)
    rows = integers.contiguous().view(torch.uint8).view(outputs // panel, groups, -1)
    return torch.cat((*shared, rows), dim=-1)
