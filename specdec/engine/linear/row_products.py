"""Linear layers by our own GPU kernel: int8 weights, and products that give a row the same bits in any batch.

PyTorch chooses its kernel, and with it the order of a row's sum, by the number of rows. Our kernel
(`engine.linear.row_kernels`) has one order for all steps and reads int8 weights directly. Called by
`engine.linear.choice` and `engine.loader`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from specdec.contract.errors import Unsupported
from specdec.engine.linear.int8 import Int8Weight
from specdec.engine.options import first_line

# Rows that tensor cores take at once. Padding fewer rows costs nothing while reading the weight limits the speed.
_FEW_ROWS = 16
_SOME_ROWS = 64


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of one program of a product."""

    rows: int
    outputs: int
    inputs: int
    """Inputs of a tile, the same for every number of rows, because it decides on a row's bits."""
    num_warps: int
    num_stages: int
    """Tiles of inputs that are loaded ahead."""


def tiling(num_rows: int, dtype: torch.dtype) -> Tiling:
    """Return the tiles of a product.

    Those of few rows were among the fastest on an H100 for the layers of Llama 3.1 8B, with 16-bit and with int8
    weights. All 16-bit products use the same tensor-core instruction, so that a row's bits do not depend on the number
    of rows; with four warps instead of two, larger tiles would use another one.
    """
    if dtype == torch.float32:  # runs without tensor cores, by code that takes long to compile for large tiles
        return Tiling(16, 16, 32, num_warps=4, num_stages=3)
    if num_rows <= _FEW_ROWS:
        return Tiling(16, 16, 128, num_warps=2, num_stages=6)
    if num_rows <= _SOME_ROWS:
        return Tiling(64, 32, 128, num_warps=2, num_stages=4)
    return Tiling(64, 64, 128, num_warps=2, num_stages=3)


def require_kernel(field: str) -> None:
    """Raise Unsupported if Triton is missing. `field`: setting that needs the kernel."""
    try:
        import triton  # noqa: F401
    except Exception as error:  # a broken installation may raise any error
        problem = f"{field} needs Triton, which cannot be imported: {first_line(error)}"
        raise Unsupported(problem, field=field) from error


def multiply(
    inputs: torch.Tensor,
    weight: torch.Tensor | Int8Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return residual + inputs W^T + bias, summed in float32 and rounded once.

    It never waits for the device, so a CUDA graph can record it.

    Args:
        inputs: [T, in], of 16 or 32 bits.
        weight: [out, in], contiguous, of the same dtype, or in int8.
        bias: [out].
        residual: [T, out].
        output_dtype: dtype of the output; None is that of the inputs.

    Returns:
        [T, out]; each row has the same bits as if it were alone.
    """
    # Imported late, so that everything else works without Triton.
    from triton.runtime.interpreter import InterpretedFunction

    from specdec.engine.linear.row_kernels import multiply_rows

    scales: torch.Tensor | None = None
    if isinstance(weight, Int8Weight):
        integers, scales = weight
    else:
        integers = weight
    num_rows, (num_outputs, num_inputs) = len(inputs), integers.shape
    output = torch.empty(num_rows, num_outputs, dtype=output_dtype or inputs.dtype, device=inputs.device)
    if not num_rows:
        return output
    inputs = inputs if inputs.stride(1) == 1 else inputs.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    tiles = tiling(num_rows, inputs.dtype)
    with torch.cuda.device_of(inputs):  # Triton launches on the current one
        multiply_rows[(-(-num_rows // tiles.rows), -(-num_outputs // tiles.outputs))](
            inputs, integers, scales, bias, residual, output,
            num_rows, num_outputs, inputs.stride(0), 0 if residual is None else residual.stride(0),
            NUM_INPUTS=num_inputs, TILE_ROWS=tiles.rows, TILE_OUTPUTS=tiles.outputs, TILE_INPUTS=tiles.inputs,
            WIDENS_OPERANDS=isinstance(multiply_rows, InterpretedFunction),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return output


class RowProjection(nn.Module):
    """Implements `engine.linear.protocol.AnyProjection` by `multiply`."""

    def __init__(
        self,
        weight: torch.Tensor | Int8Weight,
        bias: torch.Tensor | None,
        *,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        """Store a weight.

        Args:
            weight: [out, in].
            bias: [out].
            output_dtype: dtype of the output; None is that of the inputs.
        """
        super().__init__()
        own: torch.Tensor | Int8Weight = weight if isinstance(weight, Int8Weight) else weight.detach().contiguous()
        self._weight = own
        self.bias = None if bias is None else bias.detach()
        self._output_dtype = output_dtype

    @property
    def weight(self) -> torch.Tensor:
        """Weight [out, in], for modules that read it; int8 weights in float32, computed at each access."""
        return self._weight.rounded() if isinstance(self._weight, Int8Weight) else self._weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = multiply(x.reshape(-1, x.shape[-1]), self._weight, self.bias, output_dtype=self._output_dtype)
        return output.view(*x.shape[:-1], output.shape[1])

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual [T, out] + forward(x [T, in])."""
        return multiply(x, self._weight, self.bias, residual, output_dtype=self._output_dtype)
