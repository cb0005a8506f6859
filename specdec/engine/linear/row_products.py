"""Linear layers through our own kernel: int8 weights on a GPU, and products that give a row the same bits anywhere.

PyTorch's products choose their kernel, and with it the order of a row's sums, by the number of rows. Ours adds up in
one order whatever a step holds, and reads int8 weights as they lie. Not here: the arithmetic
(`engine.linear.row_kernels`), nor what is rounded to int8 (`engine.linear.int8`). Called by `engine.loader`,
which hands `RowProjection` to the stack.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from specdec.engine.linear.int8 import Int8Weight
from specdec.engine.options import first_line
from specdec.errors import Unsupported

# Tensor cores take so many rows at once: fewer are padded for nothing while a product is bound by reading its weight.
_FEW_ROWS = 16
_SOME_ROWS = 64
# From so many outputs on, programs of twice as many each still keep a device of 132 processors busy.
_MANY_OUTPUTS = 8192


@dataclass(frozen=True, slots=True)
class Tiling:
    """What one program of a product takes. Guesses, until a device has timed them."""

    rows: int
    outputs: int
    inputs: int
    """The same for every number of rows: it decides on a row's bits."""
    num_warps: int
    num_stages: int
    """Tiles of inputs on their way at once."""


def tiling(num_rows: int, num_outputs: int, dtype: torch.dtype) -> Tiling:
    """The tiles of a product.

    All of 16 bits are multiplied by the same instruction of tensor cores (two warps: four would have larger tiles take
    another one), so that a row's bits do not depend on how many rows there are.
    """
    if dtype == torch.float32:  # on no tensor core; what takes it instead takes long to compile for large tiles
        return Tiling(16, 16, 32, num_warps=4, num_stages=3)
    if num_rows <= _FEW_ROWS:
        return Tiling(16, 16 if num_outputs < _MANY_OUTPUTS else 32, 128, num_warps=2, num_stages=6)
    if num_rows <= _SOME_ROWS:
        return Tiling(64, 32, 128, num_warps=2, num_stages=4)
    return Tiling(64, 64, 128, num_warps=2, num_stages=3)


def require_kernel(field: str) -> None:
    """Raises Unsupported, of what `field` asks for: Triton is missing here."""
    try:
        import triton  # noqa: F401
    except Exception as error:  # a broken installation raises whatever it happens to
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
    """residual + inputs W^T + bias, summed in float32 and rounded once. Waits for nothing, so it can be recorded.

    Args:
        inputs: [T, in], of 16 or 32 bits.
        weight: [out, in], contiguous, of the same dtype, or in int8.
        bias: [out].
        residual: [T, out].
        output_dtype: None: the inputs'.

    Returns:
        [T, out], each row's bits being those of the row alone.
    """
    # Imported late: where Triton is absent, so are these products and nothing else.
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
    tiles = tiling(num_rows, num_outputs, inputs.dtype)
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
        """Takes a weight over.

        Args:
            weight: [out, in].
            bias: [out].
            output_dtype: None: the inputs'.
        """
        super().__init__()
        own: torch.Tensor | Int8Weight = weight if isinstance(weight, Int8Weight) else weight.detach().contiguous()
        self._weight = own
        self.bias = None if bias is None else bias.detach()
        self._output_dtype = output_dtype

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], for modules that look at the weights of their linear layers; int8 ones in float32, made anew."""
        return self._weight.rounded() if isinstance(self._weight, Int8Weight) else self._weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = multiply(x.reshape(-1, x.shape[-1]), self._weight, self.bias, output_dtype=self._output_dtype)
        return output.view(*x.shape[:-1], output.shape[1])

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual [T, out] + forward(x [T, in])."""
        return multiply(x, self._weight, self.bias, residual, output_dtype=self._output_dtype)
