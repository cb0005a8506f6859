"""Weights rounded to int8 with one scale per output: the rounding, and a model whose layers hold theirs so.

A model that holds its weights in int8 still runs, by its own forward, with what its weights were rounded to: that is
what a worker made of it is compared with, and half of the memory is free before anybody counts what is left. Not here:
what multiplies with the integers while serving (`engine.linear.row_products`, `engine.native`); the CPU's path
without native kernels, whose scales are bfloat16 (`engine.model.int8_projection`). Called by `engine.loader` and
`engine.native`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from specdec.engine.cuda_settings import release_freed

if TYPE_CHECKING:  # it imports this module
    from specdec.engine.linear.projection import AnyProjection

#: Integers are symmetric about 0.
LARGEST_INT8 = 127
# A weight is rounded so many outputs at a time: in float32 one of them alone may be gigabytes.
_ROUNDED_AT_ONCE = 4096


class Int8Weight(NamedTuple):
    """A weight [out, in] as integers from -127 to 127, and what each output's are multiplied by."""

    integers: torch.Tensor
    """int8 [out, in], contiguous."""
    scales: torch.Tensor
    """float32 [out]."""

    def rounded(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What it stands for: [out, in]."""
        return (self.integers.to(torch.float32) * self.scales[:, None]).to(dtype)


Int8ProjectionMaker = Callable[[Int8Weight, torch.Tensor | None], "AnyProjection"]
#: Of the module of that name: what its outputs' weights reach up to, float32 [out], of what those that are here do.
Reach = Callable[[str, torch.Tensor], torch.Tensor]


def own_reach(_name: str, own: torch.Tensor) -> torch.Tensor:
    """Of a module that is here as a whole."""
    return own


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [outputs, inputs] -> integers in float32 [outputs, inputs], scales [outputs]."""
    scales = _scales(weight.abs().amax(dim=1))
    return torch.round(weight / scales[:, None]), scales


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
        self.held = _rounded(original.weight.detach(), reach)

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


def _rounded(weight: torch.Tensor, reach: Callable[[torch.Tensor], torch.Tensor]) -> Int8Weight:
    integers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    own = torch.linalg.vector_norm(weight, ord=torch.inf, dim=1)  # no copy of the weight is made for it
    scales = _scales(reach(own.to(torch.float32)))
    for first in range(0, len(weight), _ROUNDED_AT_ONCE):
        part = slice(first, first + _ROUNDED_AT_ONCE)
        integers[part] = torch.round(weight[part].to(torch.float32) / scales[part, None]).to(torch.int8)
    return Int8Weight(integers, scales)


def _scales(reach: torch.Tensor) -> torch.Tensor:
    # An output whose weights are all 0 keeps them: any scale will do.
    return (reach / LARGEST_INT8).clamp_(min=torch.finfo(torch.float32).tiny)


def _detached(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach()
