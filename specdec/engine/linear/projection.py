"""Linear layers whose weights are stored in the layout that multiplies fastest.

On a CPU, PyTorch's product of a few rows with a weight as checkpoints store it reaches a fraction of the memory
bandwidth. Two other layouts are faster: for one or two rows the contiguous transpose (if there are at least as many
outputs as inputs), from three rows on oneDNN's blocked layout. Models up to `_BOTH_LAYOUTS_BYTES` keep both, larger
ones the blocked one alone; docs/history/log.md has the measurements. Results differ from `nn.Linear` by rounding alone.
Called by `engine.loader` and `engine.model.llama_stack`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.engine.linear.int8 import Int8Linear
from specdec.engine.linear.protocol import AnyProjection, ProjectionMaker

# Up to this many rows the transposed layout is faster.
_FEW_ROWS = 2
# Number of rows for which oneDNN chooses its blocks; it matters little beyond one row.
_TYPICAL_ROWS = 5
_BOTH_LAYOUTS_BYTES = 1 << 30


class Projection(nn.Module):
    """Linear layer: x [..., in] -> x W^T + b [..., out]."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, both_layouts: bool = True, is_blocked: bool = True
    ) -> None:
        """Store a weight.

        Args:
            weight: [out, in].
            bias: [out].
            both_layouts: keep a layout for few rows beside the one for many rows.
            is_blocked: use oneDNN's layout if it is faster; False keeps the checkpoint's layout.
        """
        super().__init__()
        weight = weight.detach()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach()
        self.blocked = _blocked(weight) if is_blocked else None
        self.weight_t: torch.Tensor | None = None  # [in, out]
        if self.blocked is None:
            self.weight_t = weight.t()
        elif both_layouts:
            self.weight_t = weight.t().contiguous() if self.out_features >= self.in_features else weight.t()

    @property
    def weight(self) -> torch.Tensor:
        """Weight [out, in], for modules that read it; computed at each access if only the blocked layout is kept."""
        if self.weight_t is not None:
            return self.weight_t.t()
        assert self.blocked is not None
        return self.blocked.to_dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._prefers_plain(x):
            assert self.weight_t is not None
            if self.bias is None:
                return x @ self.weight_t
            flat = torch.addmm(self.bias, x.reshape(-1, self.in_features), self.weight_t)
            return flat.view(*x.shape[:-1], self.out_features)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.bias, "none", [], "")
        return product

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual [T, out] + forward(x [T, in])."""
        if self._prefers_plain(x):
            assert self.weight_t is not None
            output = torch.addmm(residual, x, self.weight_t)
            return output if self.bias is None else output.add_(self.bias)
        total: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.blocked, self.bias, "add")
        return total

    def _prefers_plain(self, x: torch.Tensor) -> bool:
        return self.blocked is None or (self.weight_t is not None and x.numel() <= _FEW_ROWS * self.in_features)


class LogitsProjection(Projection):
    """Head of 16 bits on a GPU whose logits stay in float32: rounded to 16 bits, many would tie."""

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Return whether PyTorch supports such a product on this device, by trying one."""
        if weight.device.type != "cuda" or weight.dtype == torch.float32:
            return False
        try:
            torch.mm(weight[:1].detach(), weight[:1].detach().t(), out_dtype=torch.float32)
        except (RuntimeError, TypeError):
            return False
        return True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight_t is not None
        logits: torch.Tensor = torch.mm(x.reshape(-1, self.in_features), self.weight_t, out_dtype=torch.float32)
        if self.bias is not None:
            logits += self.bias
        return logits.view(*x.shape[:-1], self.out_features)


def _blocked(weight: torch.Tensor) -> torch.Tensor | None:
    """Return oneDNN's layout of a weight; None if the product would not use it."""
    if weight.device.type != "cpu" or weight.dtype == torch.float16 or not torch.backends.mkldnn.is_available():
        return None
    # oneDNN multiplies bfloat16 on processors with AVX-512 or AVX-NE-CONVERT alone.
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    blocked: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
    return blocked


def keeps_both_layouts(model: nn.Module) -> bool:
    """Return whether a model is small enough for a second copy of its linear weights."""
    return sum(parameter.nbytes for parameter in model.parameters()) <= _BOTH_LAYOUTS_BYTES


@dataclass(frozen=True, slots=True)
class ProjectionKinds:
    """Makers of the projections of a model's linear layers."""

    inner: ProjectionMaker
    """Maker for the decoder layers."""
    head: ProjectionMaker
    """Maker for the head."""


def fuse_linears(linears: Sequence[nn.Linear | Int8Linear], make: ProjectionMaker) -> AnyProjection:
    """Return one projection with the concatenated outputs of several linear layers that share their input.

    Layers that hold int8 weights make their own projection instead of `make`.
    """
    rounded = [linear for linear in linears if isinstance(linear, Int8Linear)]
    if rounded:
        return rounded[0].joined(rounded[1:])
    weights = [linear.weight.detach() for linear in linears]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    biases = [linear.bias for linear in linears]
    bias = None if any(bias is None for bias in biases) else torch.cat([bias.detach() for bias in biases])
    return make(weight, bias)


def relayout_linears(model: PreTrainedModel, kinds: ProjectionKinds) -> None:
    """Replace a model's linear layers by projections; a weight tied to an embedding is copied."""
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Int8Linear):
                setattr(parent, name, child.joined(()))
            elif type(child) is nn.Linear:
                make = kinds.head if child is head else kinds.inner
                setattr(parent, name, make(child.weight, child.bias))
