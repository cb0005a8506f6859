"""Triton kernels of a recorded step between its matrix products: norms, rotary embedding with KV store, and gate.

They round where the modules of transformers round (`modeling_llama`, `modeling_qwen3`): sums and products of 16-bit
numbers are computed in float32 and rounded wherever PyTorch would end an operation. The result of a row depends on that
row alone. This module imports Triton, so `engine.cuda_graphs.fused_operations` imports it when it launches a kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def add_and_normalise(
    residual,
    delta,
    gains,
    rows,
    output,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    SELECTS_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Add `delta` to `residual` and write the RMS norm of the sum.

    Args:
        residual: [T, WIDTH]; receives the sum unless SELECTS_ROWS.
        delta: [T, WIDTH]; read if HAS_DELTA.
        gains: [WIDTH].
        rows: int64 [R]: rows to normalise; read if SELECTS_ROWS.
        output: [T, WIDTH], or [R, WIDTH] if SELECTS_ROWS.
        num_rows: T, or R if SELECTS_ROWS.
        eps: added to the mean square.
        WIDTH: numbers per row.
        WIDTH_PAD: the next power of two.
        HAS_DELTA: whether `delta` is added.
        SELECTS_ROWS: whether only `rows` are normalised; the sum is then not stored.
        TILE_ROWS: rows per program.
    """
    places = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = places < num_rows
    from_rows = places
    if SELECTS_ROWS:
        from_rows = tl.load(rows + places, mask=is_row, other=0)
    columns = tl.arange(0, WIDTH_PAD)
    is_column = columns < WIDTH
    is_number = is_row[:, None] & is_column[None, :]
    numbers = from_rows[:, None] * WIDTH + columns[None, :]
    x = tl.load(residual + numbers, mask=is_number, other=0.0)  # [TILE_ROWS, WIDTH_PAD]
    if HAS_DELTA:
        added = tl.load(delta + numbers, mask=is_number, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(output.dtype.element_ty)
        if not SELECTS_ROWS:
            tl.store(residual + numbers, x, mask=is_number)
    x = x.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
    gain = tl.load(gains + columns, mask=is_column, other=0.0).to(tl.float32)
    product = normed.to(output.dtype.element_ty).to(tl.float32) * gain[None, :]
    tl.store(output + places[:, None] * WIDTH + columns[None, :], product.to(output.dtype.element_ty), mask=is_number)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots"])
def rotate_and_store(
    qkv,
    cos,
    sin,
    gains,
    slots,
    kv_rows,
    num_rows,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    """Normalise and rotate queries in place and keys into the cache, and copy values into the cache.

    Args:
        qkv: [T, (NUM_HEADS + 2 * NUM_KV_HEADS) * DIM]: queries, keys, values.
        cos: [T, DIM] at the rows' positions.
        sin: [T, DIM].
        gains: [NUM_HEADS + NUM_KV_HEADS, DIM] of the per-head norms of queries and keys; read if HAS_NORM.
        slots: int64 [T]: KV slot of each row.
        kv_rows: [slots, 2 * NUM_KV_HEADS * DIM], keys of all heads first.
        num_rows: T.
        eps: epsilon of the norms.
        NUM_HEADS: number of query heads.
        NUM_KV_HEADS: number of KV heads.
        DIM: numbers per head; even.
        HALF_PAD: the next power of two of DIM / 2.
        HAS_NORM: whether queries and keys are normalised.
        TILE_HEADS: heads per program; the heads of a row are consecutive.
    """
    all_heads: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    half: tl.constexpr = DIM // 2
    places = tl.program_id(0).to(tl.int64) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    rows, heads = places // all_heads, places % all_heads
    is_head = rows < num_rows
    columns = tl.arange(0, HALF_PAD)[None, :]
    is_number = is_head[:, None] & (columns < half)
    is_rotated = (heads < NUM_HEADS + NUM_KV_HEADS)[:, None]
    dtype = qkv.dtype.element_ty
    first = qkv + places[:, None] * DIM + columns
    plain_low = tl.load(first, mask=is_number, other=0.0)
    plain_high = tl.load(first + half, mask=is_number, other=0.0)
    low, high = plain_low.to(tl.float32), plain_high.to(tl.float32)  # [TILE_HEADS, HALF_PAD]
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / DIM + eps)[:, None]
        gain = gains + heads[:, None] * DIM + columns
        low_gain = tl.load(gain, mask=is_number & is_rotated, other=0.0).to(tl.float32)
        high_gain = tl.load(gain + half, mask=is_number & is_rotated, other=0.0).to(tl.float32)
        low = ((low * scale).to(dtype).to(tl.float32) * low_gain).to(dtype).to(tl.float32)
        high = ((high * scale).to(dtype).to(tl.float32) * high_gain).to(dtype).to(tl.float32)
    angles = rows[:, None] * DIM + columns
    low_cos = tl.load(cos + angles, mask=is_number, other=0.0).to(tl.float32)
    high_cos = tl.load(cos + angles + half, mask=is_number, other=0.0).to(tl.float32)
    low_sin = tl.load(sin + angles, mask=is_number, other=0.0).to(tl.float32)
    high_sin = tl.load(sin + angles + half, mask=is_number, other=0.0).to(tl.float32)
    new_low = (low * low_cos).to(dtype).to(tl.float32) - (high * low_sin).to(dtype).to(tl.float32)
    new_high = (high * high_cos).to(dtype).to(tl.float32) + (low * high_sin).to(dtype).to(tl.float32)
    new_low = tl.where(is_rotated, new_low.to(dtype), plain_low)
    new_high = tl.where(is_rotated, new_high.to(dtype), plain_high)

    is_query = is_number & (heads < NUM_HEADS)[:, None]
    tl.store(first, new_low, mask=is_query)
    tl.store(first + half, new_high, mask=is_query)
    is_stored = is_number & (heads >= NUM_HEADS)[:, None]
    row_slots = tl.load(slots + rows, mask=is_head, other=0)
    stored = kv_rows + (row_slots * (2 * NUM_KV_HEADS) + heads - NUM_HEADS)[:, None] * DIM + columns
    tl.store(stored, new_low, mask=is_stored)
    tl.store(stored + half, new_high, mask=is_stored)


@triton.jit(do_not_specialize=["num_rows"])
def gate(gate_up, output, num_rows, WIDTH: tl.constexpr, TILE_NUMBERS: tl.constexpr):
    """Write silu(gate) * up.

    Args:
        gate_up: [T, 2 * WIDTH], gates first.
        output: [T, WIDTH].
        num_rows: T.
        WIDTH: numbers per output row.
        TILE_NUMBERS: output numbers per program.
    """
    places = tl.program_id(0).to(tl.int64) * TILE_NUMBERS + tl.arange(0, TILE_NUMBERS)
    rows = places // WIDTH
    is_number = rows < num_rows
    dtype = output.dtype.element_ty
    x = tl.load(gate_up + places + rows * WIDTH, mask=is_number, other=0.0).to(tl.float32)
    up = tl.load(gate_up + places + rows * WIDTH + WIDTH, mask=is_number, other=0.0).to(tl.float32)
    gated = (x / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32)
    tl.store(output + places, (gated * up).to(dtype), mask=is_number)
