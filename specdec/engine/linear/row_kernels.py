"""Triton kernel of linear layers that give a row the same bits in any batch, with weights of 8, 16 or 32 bits.

One program computes a tile of outputs: it goes over all inputs in tiles of one size, from the first to the last, and
adds each tile's product to its sums. No sum is divided among programs, and a row depends on its own inputs alone. So
the order of a row's sum depends neither on the number of rows nor on the row's index. int8 weights are converted to the
inputs' dtype in registers, which represents each of them exactly; their scales multiply the finished sums.
`engine.linear.row_products` launches the kernel. This module imports Triton, so it is imported only if Triton is
installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


# The number of rows differs from step to step; a specialised kernel for each would not pay.
@triton.jit(do_not_specialize=["num_rows"])
def multiply_rows(
    inputs,
    weight,
    scales,
    bias,
    residual,
    output,
    num_rows,
    num_outputs,
    input_stride,
    residual_stride,
    NUM_INPUTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    WIDENS_OPERANDS: tl.constexpr,
):
    """Compute one tile of residual + (inputs times weight transposed) * scales + bias.

    Args:
        inputs: [T, NUM_INPUTS], rows `input_stride` apart.
        weight: [num_outputs, NUM_INPUTS], int8 or of the inputs' dtype, contiguous.
        scales: [num_outputs]; None for all 1.
        bias: [num_outputs]; None for all 0.
        residual: [T, num_outputs], rows `residual_stride` apart; None for all 0.
        output: [T, num_outputs], contiguous.
        num_rows: T.
        num_outputs: number of the layer's outputs.
        input_stride: stride of the rows of `inputs`, in elements.
        residual_stride: stride of the rows of `residual`, in elements.
        NUM_INPUTS: number of the layer's inputs.
        TILE_ROWS: rows of a program.
        TILE_OUTPUTS: outputs of a program.
        TILE_INPUTS: inputs of one product; the only size that decides on a row's bits.
        WIDENS_OPERANDS: convert operands to float32, because Triton's interpreter has no bfloat16 products.
    """
    # Programs that share weights are neighbours, so all except one find them in the device's cache.
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    outputs = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    row_places = rows.to(tl.int64) * input_stride
    weight_places = outputs.to(tl.int64) * NUM_INPUTS
    sums = tl.full([TILE_ROWS, TILE_OUTPUTS], 0.0, tl.float32)
    for first in range(0, NUM_INPUTS, TILE_INPUTS):
        places = first + tl.arange(0, TILE_INPUTS)
        seen_rows, seen_outputs = is_row[:, None], is_output[None, :]
        if NUM_INPUTS % TILE_INPUTS != 0:
            is_input = places < NUM_INPUTS
            seen_rows, seen_outputs = seen_rows & is_input[None, :], seen_outputs & is_input[:, None]
        input_tile = tl.load(inputs + row_places[:, None] + places[None, :], mask=seen_rows, other=0.0)
        weight_tile = tl.load(weight + weight_places[None, :] + places[:, None], mask=seen_outputs, other=0)
        if WIDENS_OPERANDS:
            input_tile = input_tile.to(tl.float32)
        sums = tl.dot(input_tile, weight_tile.to(input_tile.dtype), acc=sums, input_precision="ieee")
    if scales is not None:
        sums = sums * tl.load(scales + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        sums = sums + tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    is_wanted = is_row[:, None] & is_output[None, :]
    if residual is not None:
        kept = tl.load(
            residual + rows.to(tl.int64)[:, None] * residual_stride + outputs[None, :], mask=is_wanted, other=0.0
        )
        sums = sums + kept.to(tl.float32)
    tl.store(
        output + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :],
        sums.to(output.dtype.element_ty),
        mask=is_wanted,
    )
