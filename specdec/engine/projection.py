"""Linear layers stored the way they multiply fastest.

On a CPU, a matrix with at least as many outputs as inputs multiplies a few rows up to twice as fast when its transpose
lies contiguously; one with fewer outputs does not (docs/LOG.md has the figures). Only this process's copy of the
weights is laid out anew; results differ from `nn.Linear` by rounding alone. Called by `engine.hf_adapter` and
`engine.llama_stack`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Projection(nn.Module):
    """x [..., in] -> x W^T + b [..., out], with the weight kept as [in, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, copy: bool = True) -> None:
        """weight: [out, in]; with `copy` it is laid out anew where that multiplies faster."""
        super().__init__()
        out_features, in_features = weight.shape
        transposed = weight.detach().t()
        if copy and weight.device.type == "cpu" and out_features >= in_features:
            transposed = transposed.contiguous()
        self.weight_t = transposed  # [in, out]
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return x @ self.weight_t
        if x.ndim == 2:
            return torch.addmm(self.bias, x, self.weight_t)
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight_t).view(*x.shape[:-1], self.weight_t.shape[1])

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual [T, out] + forward(x [T, in])."""
        output = torch.addmm(residual, x, self.weight_t)
        return output if self.bias is None else output.add_(self.bias)


def fuse_linears(linears: Sequence[nn.Linear]) -> Projection:
    """One projection whose outputs are those of several that share their input, side by side."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias for linear in linears]
    if any(bias is None for bias in biases):
        return Projection(weight, None)
    return Projection(weight, torch.cat([bias.detach() for bias in biases]))


def relayout_linears(model: nn.Module) -> None:
    """Replaces a CPU model's `nn.Linear` modules where `Projection` is faster; tied weights stay as they are."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.out_features >= child.in_features and owners[id(child.weight)] == 1:
                setattr(parent, name, Projection(child.weight, child.bias))
