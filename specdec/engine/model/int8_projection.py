"""Linear layers with int8 weights and one scale per output, for CPUs.

Not a quantised arithmetic: activations are rounded to bfloat16, products are summed in float32, and what comes in as
float32 leaves as float32, so that norms, attention, the KV cache and the residual stream stay as they are. Few rows go
through PyTorch's own weight-only kernel, which gives a row the same bits in any company; from `_MANY_ROWS` on reading
the weights costs less than multiplying, and float32 products of the same integers are the faster ones.
docs/adr/0005-int8-weights.md says why not a library. Called by `engine.loader` and `engine.model.llama_stack`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

# From this many rows on, the kernel for few rows is the slower one.
_MANY_ROWS = 24
# Its inner loop takes this many inputs at once, and reads past the end of a weight that is no multiple of it.
_KERNEL_INPUTS = 16
_LARGEST = 127


class Int8Projection(nn.Module):
    """x [..., in] -> x W^T + b [..., out], W rounded to multiples of a scale per output."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Quantises a weight; it is not kept.

        Args:
            weight: float [out, in].
            bias: [out].
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach()
        integers, self.scales = _quantise(weight.detach())
        self.integers = integers.to(torch.int8)

    @staticmethod
    def round_weight(weight: torch.Tensor) -> torch.Tensor:
        """What a weight [out, in] is multiplied as, in float32."""
        integers, scales = _quantise(weight)
        return integers.mul_(scales.to(torch.float32)[:, None])

    @property
    def weight(self) -> torch.Tensor:
        """float32 [out, in], for modules that look at the weights of their linear layers; made anew each time."""
        return self.integers.to(torch.float32) * self.scales.to(torch.float32)[:, None]

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
            return torch._weight_int8pack_mm(rows, self.integers, self.scales)
        output = linear(rows.to(torch.float32), self.integers.to(torch.float32))
        return output.mul_(self.scales).to(torch.bfloat16)


def _quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] -> integers in float32 [out, in], bfloat16 scales [out]."""
    weight = weight.to(torch.float32)
    smallest = torch.finfo(torch.bfloat16).tiny  # of an output whose weights are all 0
    # The kernel takes bfloat16 scales: rounded first, so that the integers make up for it.
    scales = (weight.abs().amax(dim=1) / _LARGEST).clamp_(min=smallest).to(torch.bfloat16)
    return torch.round(weight / scales.to(torch.float32)[:, None]).clamp_(-_LARGEST, _LARGEST), scales
