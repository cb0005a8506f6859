"""The shortest format that holds every number of a table of weights exactly, and the table in it, panel by panel.

Seen by trying, whatever the checkpoint says of itself: one that was stored in 16 bits, or in llama.cpp's Q4_1 or Q8_0
and made float32 since, is held as it was stored, and the kernels get the same numbers back. Not here: int8, which
rounds (`runner`). As `Format` and `Product` in `layout.h`. Called by `runner`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch


class Format(IntEnum):
    """As in `layout.h`."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3
    SCALED4 = 4
    SCALED8 = 5


FORMAT_OF = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16, torch.float16: Format.FLOAT16}

#: Inputs of an output that have their scale and their offset in common; `SHARED` in `layout.h`.
SHARED = 32

#: Most tables that a format does not hold show it in their first rows.
_FIRST_ROWS = 4


class Scaled(NamedTuple):
    """Integers with what they are multiplied by and what is added, of `outputs` times `inputs` weights."""

    integers: torch.Tensor
    """uint8 or int8 [outputs, inputs / SHARED, SHARED]."""
    scales: torch.Tensor
    """float16 [outputs, inputs / SHARED], as the offsets."""
    offsets: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        """float32 [outputs, inputs]. The product is exact, so that the kernels round nothing else."""
        scales, offsets = (part.float().unsqueeze(-1) for part in (self.scales, self.offsets))
        return (self.integers.float() * scales + offsets).flatten(1)


def halved(weight: torch.Tensor) -> torch.Tensor:
    """The same numbers in 16 bits where these hold every one of them, else `weight` itself."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(part.to(dtype).float(), part) for part in _from_small(weight)):
            return weight.to(dtype)
    return weight


def pack_shortest(weight: torch.Tensor, panel: int) -> tuple[Format, torch.Tensor]:
    """The table as the kernels read it, in the shortest format.

    Args:
        weight: float32 [whole panels of outputs, inputs].
        panel: outputs of a panel.
    """
    if weight.shape[1] % SHARED == 0:
        for format_, scale in ((Format.SCALED4, _scale4), (Format.SCALED8, _scale8)):
            if all(torch.equal(scale(part).weight, part) for part in _from_small(weight)):
                return format_, _pack_scaled(scale(weight), panel, format_)
    return pack(halved(weight), panel)


def pack(weight: torch.Tensor, panel: int) -> tuple[Format, torch.Tensor]:
    """The table in panels, in its own dtype; see `layout.h`."""
    packed = weight.view(-1, panel, weight.shape[1]).transpose(1, 2)
    if weight.dtype == torch.bfloat16:
        packed = packed.unflatten(-1, (2, panel // 2)).transpose(-1, -2).flatten(-2)
    return FORMAT_OF[weight.dtype], packed


def _from_small(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What to try on: a few rows, then all."""
    return weight[:_FIRST_ROWS], weight


def _scale4(weight: torch.Tensor) -> Scaled:
    """As Q4_1: from the least number of a group on, in 15 steps to the largest."""
    groups = weight.view(len(weight), -1, SHARED)
    offsets = groups.amin(-1).half()
    scales = ((groups.amax(-1) - groups.amin(-1)) / 15).half()
    return _rounded(groups, scales, offsets, 0, 15, torch.uint8)


def _scale8(weight: torch.Tensor) -> Scaled:
    """As Q8_0: the largest number of a group is 127 steps from 0."""
    groups = weight.view(len(weight), -1, SHARED)
    scales = (groups.abs().amax(-1) / 127).half()
    return _rounded(groups, scales, torch.zeros_like(scales), -127, 127, torch.int8)


def _rounded(
    groups: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, least: int, most: int, dtype: torch.dtype
) -> Scaled:
    steps = (groups - offsets.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)
    # Without a step to divide by, all numbers of the group are its offset.
    return Scaled(steps.nan_to_num_(0.0).round_().clamp_(least, most).to(dtype), scales, offsets)


def _pack_scaled(scaled: Scaled, panel: int, format_: Format) -> torch.Tensor:
    """uint8 [panels, groups, bytes of a group]; see `layout.h`."""
    outputs, groups, _ = scaled.integers.shape
    shared = [part.view(-1, panel, groups).transpose(1, 2).contiguous().view(torch.uint8) for part in scaled[1:]]
    integers = scaled.integers.view(-1, panel, groups, SHARED).permute(0, 2, 3, 1)  # [panels, groups, SHARED, panel]
    if format_ is Format.SCALED4:
        low, high = integers.split(panel // 2, dim=-1)
        integers = low | (high << 4)
    rows = integers.contiguous().view(torch.uint8).view(outputs // panel, groups, -1)
    return torch.cat((*shared, rows), dim=-1)
