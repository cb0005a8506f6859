"""Launches of the fused kernels between the matrix products of a recorded step.

The functions do not wait for the device, and the bits of a row do not depend on the other rows. The kernels are in
`engine.cuda_graphs.fused_kernels`. Called by `engine.cuda_graphs.fused_stack`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.engine.model.kv_cache import LayerKv


@dataclass(frozen=True, slots=True)
class ProgramSizes:
    """Work per program, in powers of two. It does not change any result."""

    rows: int = 1
    heads: int = 4
    numbers: int = 1024


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm."""

    gains: torch.Tensor
    """[width], or [heads, head_dim] for the per-head norms of queries and keys."""
    eps: float


def normalise(
    residual: torch.Tensor, delta: torch.Tensor | None, norm: Norm, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Add `delta` to `residual` in place and return the norm of the sum.

    Args:
        residual: [T, width], contiguous.
        delta: [T, width], contiguous; None: nothing is added.
        norm: a norm over `width`.
        rows: int64 [R]: rows to normalise; `residual` is then unchanged. None: all rows.

    Returns:
        [T or R, width].
    """
    # Imported late, here and below: the rest of the package must work without Triton.
    from triton import next_power_of_2

    from specdec.engine.cuda_graphs.fused_kernels import add_and_normalise

    width, tile_rows = residual.shape[1], ProgramSizes().rows
    num_rows = len(residual) if rows is None else len(rows)
    output = torch.empty(num_rows, width, dtype=residual.dtype, device=residual.device)
    with torch.cuda.device_of(residual):  # Triton launches on the current device
        add_and_normalise[(-(-num_rows // tile_rows),)](
            residual, residual if delta is None else delta, norm.gains, residual if rows is None else rows, output,
            num_rows, norm.eps, WIDTH=width, WIDTH_PAD=next_power_of_2(width), HAS_DELTA=delta is not None,
            SELECTS_ROWS=rows is not None, TILE_ROWS=tile_rows, num_warps=8,
        )  # fmt: skip
    return output


def rotate(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: Norm | None,
    slots: torch.Tensor,
    layer: LayerKv,
) -> torch.Tensor:
    """Apply the rotary embedding to queries and keys, and store keys and values in the cache.

    Args:
        qkv: [T, (H + 2 * num_kv_heads) * head_dim], contiguous; its queries are overwritten.
        cos: [T, head_dim] in the model's dtype, contiguous.
        sin: as `cos`.
        norm: norm of queries and keys before the rotation; None: no norm.
        slots: int64 [T]: KV slot of each row.
        layer: the layer's cache; values have as many numbers as keys.

    Returns:
        queries [T, H, head_dim], a view of `qkv`.
    """
    from triton import next_power_of_2

    from specdec.engine.cuda_graphs.fused_kernels import rotate_and_store

    num_rows, dim, kv_heads = len(qkv), layer.shape.key_dim, layer.shape.num_kv_heads
    num_heads = qkv.shape[1] // dim - 2 * kv_heads
    tile_heads = ProgramSizes().heads
    with torch.cuda.device_of(qkv):
        rotate_and_store[(-(-num_rows * (num_heads + 2 * kv_heads) // tile_heads),)](
            qkv, cos, sin, qkv if norm is None else norm.gains, slots, layer.rows, num_rows,
            0.0 if norm is None else norm.eps, NUM_HEADS=num_heads, NUM_KV_HEADS=kv_heads, DIM=dim,
            HALF_PAD=next_power_of_2(dim // 2), HAS_NORM=norm is not None, TILE_HEADS=tile_heads, num_warps=4,
        )  # fmt: skip
    return qkv.view(num_rows, -1, dim)[:, :num_heads]


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up as [T, width], from contiguous [T, 2 * width] with the gates first."""
    from specdec.engine.cuda_graphs.fused_kernels import gate

    num_rows, width = len(gate_up), gate_up.shape[1] // 2
    tile_numbers = ProgramSizes().numbers
    output = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    with torch.cuda.device_of(gate_up):
        gate[(-(-num_rows * width // tile_numbers),)](
            gate_up, output, num_rows, WIDTH=width, TILE_NUMBERS=tile_numbers, num_warps=4
        )
    return output
