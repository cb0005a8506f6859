"""Weights rounded to int8 with one scale per output: the rounding, layers that hold them, and the product on a CPU.

A model whose layers hold int8 weights still runs, by its own forward, with what its weights were rounded to: a worker
made of it is compared with that, and half of the memory is free before anything counts what is left. `Int8Projection`
multiplies with PyTorch's operations on a CPU, where the native kernels do not compute the model
(docs/adr/0005-int8-weights.md). Called by `engine.loader`, `engine.native`, `engine.cuda_graphs` and `engine.parallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from specdec.engine.cuda_settings import release_freed
from specdec.engine.linear.protocol import AnyProjection

#: Integers are symmetric about 0.
LARGEST_INT8 = 127
# Outputs of a weight that are rounded at a time: a whole weight in float32 may be gigabytes.
_ROUNDED_AT_ONCE = 4096
# From this many rows on, PyTorch's int8 kernel is slower than a float32 product of the same integers.
_MANY_ROWS = 24
# The kernel's inner loop takes this many inputs at once, and reads past the end of a weight that is no multiple of it.
_KERNEL_INPUTS = 16


class Int8Weight(NamedTuple):
    """A weight [out, in] as integers from -127 to 127, and what each output's are multiplied by."""

    integers: torch.Tensor
    """int8 [out, in], contiguous."""
    scales: torch.Tensor
    """[out], in the dtype that the product takes."""

    def rounded(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What it stands for: [out, in]."""
        return (self.integers.to(torch.float32) * self.scales[:, None]).to(dtype)


Int8ProjectionMaker = Callable[[Int8Weight, torch.Tensor | None], AnyProjection]
#: Of the module of that name: what its outputs' weights reach up to, float32 [out], of what those that are here do.
Reach = Callable[[str, torch.Tensor], torch.Tensor]


def own_reach(_name: str, own: torch.Tensor) -> torch.Tensor:
    """Of a module that is here as a whole."""
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
        reach: where only a part of the inputs is here, maps the largest magnitude of each output, float32 [out], to
            that of the whole weight.
        scale_dtype: dtype of the scales. They are rounded to it first, so that the integers make up for it.
    """
    integers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    largest = torch.linalg.vector_norm(weight, ord=torch.inf, dim=1).to(torch.float32)  # copies no weight
    if reach is not None:
        largest = reach(largest)
    # Any scale will do for an output whose weights are all 0.
    scales = (largest / LARGEST_INT8).clamp_(min=torch.finfo(scale_dtype).tiny).to(scale_dtype)
    for first in range(0, len(weight), _ROUNDED_AT_ONCE):
        part = slice(first, first + _ROUNDED_AT_ONCE)
        quotients = weight[part].to(torch.float32) / scales[part, None].to(torch.float32)
        integers[part] = torch.round(quotients).clamp_(-LARGEST_INT8, LARGEST_INT8).to(torch.int8)
    return Int8Weight(integers, scales)


def hold_in_int8(model: PreTrainedModel, make: Int8ProjectionMaker, reach: Reach = own_reach) -> None:
    """Rounds the weights of a model's linear layers, but for the head's, one layer after the other.

    Args:
        model: loaded.
        make: what is to multiply with them while serving.
        reach: of a module of which a part of the inputs is here, to be rounded as the whole is.
    """
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(parent, name, Int8Linear(child, make, partial(reach, name)))
                del child
                release_freed(model.device)


class Int8Linear(nn.Module):
    """Stands for an `nn.Linear` whose weight was rounded; see `engine.linear.projection.fuse_linears`."""

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
        """What the weight was rounded to, made anew; for modules that look at it."""
        return self.held.rounded(self._dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> x W^T + b [..., out], with the weight made anew."""
        return linear(x, self.held.rounded(x.dtype), self.bias)

    def joined(self, others: Sequence[Int8Linear]) -> AnyProjection:
        """One projection whose outputs are this layer's and those of others that share its inputs, side by side."""
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
        """float32 [out, in], for modules that look at the weights of their linear layers; made anew each time."""
        return self.held.rounded()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self._product(x).to(x.dtype)
        if self.bias is not None:
            output = output + self.bias
        return output.view(*x.shape[:-1], self.out_features)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual [T, out] + forward(x [T, in])."""
        output = residual + self._product(x)
        return output if self.bias is None else output.add_(self.bias)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> bfloat16 [rows, out]."""
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        if len(rows) < _MANY_ROWS and self.in_features % _KERNEL_INPUTS == 0:
            return torch._weight_int8pack_mm(rows, *self.held)
        output = linear(rows.to(torch.float32), self.held.integers.to(torch.float32))
        return output.mul_(self.held.scales).to(torch.bfloat16)


def _detached(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach()
