"""Weights rounded to int8 with one scale per output: the rounding, layers that hold them, and a projection for CPUs.

A model whose layers hold int8 weights still runs by its own forward pass, with the rounded values, so a worker can be
compared with it; and the memory of the original weights is free before the KV pool is sized. `Int8Projection` uses
PyTorch's operations on a CPU, for models that native kernels do not support (docs/adr/0005-int8-weights.md). Called by
`engine.loader`, `engine.native`, `engine.cuda_graphs` and `engine.parallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from specdec.engine.cuda_device import release_freed
from specdec.engine.linear.protocol import AnyProjection

if TYPE_CHECKING:  # its modules take 100 MB, and kept layouts are loaded without it
    from transformers import PreTrainedModel

#: Largest magnitude of an integer; the range is symmetric.
LARGEST_INT8 = 127
# Outputs of a weight that are rounded at a time: a whole weight in float32 may take gigabytes.
_ROUNDED_AT_ONCE = 4096
# From this many rows on, PyTorch's int8 kernel is slower than a float32 product of the same integers.
_MANY_ROWS = 24
# The kernel's inner loop takes this many inputs at once, and reads past the end of a weight of any other multiple.
_KERNEL_INPUTS = 16


class Int8Weight(NamedTuple):
    """A weight [out, in] as integers from -127 to 127, with one scale per output."""

    integers: torch.Tensor
    """int8 [out, in], contiguous."""
    scales: torch.Tensor
    """[out], in the dtype that the kernel needs."""

    def rounded(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the rounded weight [out, in]."""
        return (self.integers.to(torch.float32) * self.scales[:, None]).to(dtype)


Int8ProjectionMaker = Callable[[Int8Weight, torch.Tensor | None], AnyProjection]
#: Maps a module's name and the largest magnitudes of its outputs' weights in this process, float32 [out], to those of
#: the whole weights.
Reach = Callable[[str, torch.Tensor], torch.Tensor]


def own_reach(_name: str, own: torch.Tensor) -> torch.Tensor:
    """Return the magnitudes of a module that this process holds as a whole."""
    return own


def round_to_int8(
    weight: torch.Tensor,
    reach: Callable[[torch.Tensor], torch.Tensor] | None = None,
    *,
    scale_dtype: torch.dtype = torch.float32,
) -> Int8Weight:
    """Round a weight to multiples of one scale per output.

    Args:
        weight: float [out, in].
        reach: maps the largest magnitude of each output, float32 [out], to that of the whole weight, if this process
            holds a part of the inputs only.
        scale_dtype: dtype of the scales. They are rounded to it first, so that the integers make up for it.
    """
    integers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    largest = torch.linalg.vector_norm(weight, ord=torch.inf, dim=1).to(torch.float32)  # makes no copy of the weight
    if reach is not None:
        largest = reach(largest)
    # An output whose weights are all 0 may have any scale.
    scales = (largest / LARGEST_INT8).clamp_(min=torch.finfo(scale_dtype).tiny).to(scale_dtype)
    for first in range(0, len(weight), _ROUNDED_AT_ONCE):
        part = slice(first, first + _ROUNDED_AT_ONCE)
        quotients = weight[part].to(torch.float32) / scales[part, None].to(torch.float32)
        integers[part] = torch.round(quotients).clamp_(-LARGEST_INT8, LARGEST_INT8).to(torch.int8)
    return Int8Weight(integers, scales)


def hold_in_int8(model: PreTrainedModel, make: Int8ProjectionMaker, reach: Reach = own_reach) -> None:
    """Round the weights of a model's linear layers except the head, one layer after the other.

    Args:
        model: loaded model.
        make: makes the projection that serves a rounded weight.
        reach: see `Reach`; parts of a weight are then rounded as the whole weight is.
    """
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(parent, name, Int8Linear(child, make, partial(reach, name)))
                del child
                release_freed(model.device)


class Int8Linear(nn.Module):
    """Linear layer that holds a rounded weight; see `engine.linear.projection.fuse_linears`."""

    def __init__(
        self, original: nn.Linear, make: Int8ProjectionMaker, reach: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = original.out_features, original.in_features
        self.bias = original.bias
        self._dtype = original.weight.dtype
        self._make = make
        self.held = round_to_int8(original.weight.detach(), reach)

    @property
    def weight(self) -> torch.Tensor:
        """Rounded weight, computed at each access, for modules that read it."""
        return self.held.rounded(self._dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b [..., out] of x [..., in], with the weight computed from its integers."""
        return linear(x, self.held.rounded(x.dtype), self.bias)

    def joined(self, others: Sequence[Int8Linear]) -> AnyProjection:
        """Return one projection with the outputs of this layer and of others that share its inputs, concatenated."""
        if not others:
            return self._make(self.held, _detached(self.bias))
        layers = (self, *others)
        held = Int8Weight(*(torch.cat(parts) for parts in zip(*(layer.held for layer in layers), strict=True)))
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        return self._make(held, torch.cat(biases) if biases else None)


class Int8Projection(nn.Module):
    """x [..., in] -> x W^T + b [..., out] on a CPU, W rounded to int8.

    Activations are rounded to bfloat16, products are summed in float32, and float32 inputs give float32 outputs. Few
    rows go through PyTorch's weight-only kernel, which gives a row the same bits in any batch.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Round a weight [out, in]; the original is not kept."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = _detached(bias)
        self.held = self._round(weight.detach())

    @staticmethod
    def round_weight(weight: torch.Tensor) -> torch.Tensor:
        """Return the float32 values that a weight [out, in] is multiplied as."""
        return Int8Projection._round(weight).rounded()

    @staticmethod
    def _round(weight: torch.Tensor) -> Int8Weight:
        return round_to_int8(weight, scale_dtype=torch.bfloat16)  # the kernel's

    @property
    def weight(self) -> torch.Tensor:
        """Rounded weight, float32 [out, in], computed at each access, for modules that read it."""
        return self.held.rounded()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self._product(x).to(x.dtype)
        if self.bias is not None:
            output = output + self.bias
        return output.view(*x.shape[:-1], self.out_features)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual [T, out] + forward(x [T, in])."""
        output = residual + self._product(x)
        return output if self.bias is None else output.add_(self.bias)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of x [..., in] with the weight, bfloat16 [rows, out]."""
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        if len(rows) < _MANY_ROWS and self.in_features % _KERNEL_INPUTS == 0:
            return torch._weight_int8pack_mm(rows, *self.held)
        output = linear(rows.to(torch.float32), self.held.integers.to(torch.float32))
        return output.mul_(self.held.scales).to(torch.bfloat16)


def _detached(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach()
