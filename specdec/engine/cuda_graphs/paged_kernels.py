"""The two Triton kernels of paged attention: partial sums over parts of the context, and their merge.

Queries are ragged: sequence b has the rows [first_rows[b], first_rows[b + 1]) of the flat batch, and its last row is at
its last key. The heads that share keys form the rows of one matrix, a few queries at a time (a tile). Keys are read
through block tables, in tiles that begin at fixed positions. Units of tiles are assigned to the splits in turn, and a
split sums its units in the order of their positions. The order of all sums therefore depends on a row's position alone,
not on the other rows, on other sequences or on the length of the table.

Data that no row of a tile sees is not read: keys past the last row, their table entries, and whole tiles before the
window. A row that sees no key gets zeros. This module imports Triton, so `engine.cuda_graphs.paged_attention` imports
it when it launches a kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _own_units(
    first_position, last_position, split, WINDOW: tl.constexpr, UNIT_KEYS: tl.constexpr, NUM_SPLITS: tl.constexpr
):
    """Return the first unit of `split` that rows at these positions see, and the end of all units that they see."""
    first_key = first_position * 0
    if WINDOW > 0:
        first_key = tl.maximum(first_position - (WINDOW - 1), 0)
    first_unit = first_key // UNIT_KEYS
    num_units = (tl.maximum(last_position + 1, 0) + UNIT_KEYS - 1) // UNIT_KEYS
    return first_unit + (split + NUM_SPLITS - first_unit % NUM_SPLITS) % NUM_SPLITS, num_units


# Without these lists Triton would compile one kernel per bucket, for values and alignments that it specialises.
@triton.jit(
    do_not_specialize=["num_sequences"],
    do_not_specialize_on_alignment=["tables", "table_firsts", "lengths", "first_rows"],
)
def attend_parts(
    query,
    kv_rows,
    tables,
    table_firsts,
    lengths,
    first_rows,
    part_sums,
    part_maxima,
    part_weights,
    num_sequences,
    query_stride,
    score_factor,
    softcap,
    WINDOW: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    QUERIES_PER_KV_HEAD: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    UNIT_TILES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MOST_SEQUENCES: tl.constexpr,
    WIDENS_OPERANDS: tl.constexpr,
):
    """Attend one tile of queries of one KV head to the keys of one split.

    Args:
        query: [T, H, KEY_DIM], rows `query_stride` apart.
        kv_rows: [slots, NUM_KV_HEADS * (KEY_DIM + VALUE_DIM)], keys of all heads first.
        tables: int64: block ids of all sequences.
        table_firsts: int64 [B]: index of each sequence's first block id.
        lengths: int64 [B]: number of keys, including those of this step.
        first_rows: int32 [B + 1].
        part_sums: float32 [T, H, NUM_SPLITS, VALUE_DIM], not divided by the weights; written if a split has keys.
        part_maxima: float32 [T, H, NUM_SPLITS]: maximum score times log2(e).
        part_weights: float32 [T, H, NUM_SPLITS]: sum of 2 ** (score - maximum).
        num_sequences: B, at most MOST_SEQUENCES.
        query_stride: in elements.
        score_factor: log2(e) * scale, or scale / softcap if IS_CAPPED.
        softcap: log2(e) * softcap; read if IS_CAPPED.
        WINDOW: number of keys that a row sees, its own included; 0: all keys up to its own.
        IS_CAPPED: whether scores are bounded by tanh.
        NUM_KV_HEADS: number of KV heads.
        QUERIES_PER_KV_HEAD: number of heads that share keys.
        KEY_DIM: numbers per key.
        VALUE_DIM: numbers per value.
        KEY_PAD: power of two, at least KEY_DIM.
        VALUE_PAD: power of two, at least VALUE_DIM.
        PAGE_TOKENS: tokens per KV block.
        TILE_ROWS: rows of a product: the heads of TILE_QUERIES queries, and padding.
        TILE_QUERIES: at most TILE_ROWS / QUERIES_PER_KV_HEAD.
        TILE_KEYS: keys of a product.
        UNIT_TILES: consecutive tiles of one split.
        NUM_SPLITS: a power of two.
        MOST_SEQUENCES: a power of two.
        WIDENS_OPERANDS: whether operands become float32 first, because Triton's interpreter cannot multiply bfloat16.
    """
    place, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # A sequence's first tile follows from its first row without counting tiles; a few programs therefore have no tile.
    sequences = tl.arange(0, MOST_SEQUENCES)
    is_sequence = sequences < num_sequences
    first_places = tl.load(first_rows + sequences, mask=is_sequence, other=0) // TILE_QUERIES + sequences
    sequence = tl.sum((is_sequence & (first_places <= place)).to(tl.int32), axis=0) - 1
    first_row = tl.load(first_rows + sequence)
    num_queries = tl.load(first_rows + sequence + 1) - first_row
    first_query = (place - first_row // TILE_QUERIES - sequence) * TILE_QUERIES
    if first_query >= num_queries:
        return

    start = tl.load(lengths + sequence).to(tl.int32) - num_queries  # position of the sequence's first query
    last_position = start + tl.minimum(first_query + TILE_QUERIES, num_queries) - 1
    first_unit, num_units = _own_units(
        start + first_query, last_position, split, WINDOW, TILE_KEYS * UNIT_TILES, NUM_SPLITS
    )
    if first_unit >= num_units:
        return

    rows = tl.arange(0, TILE_ROWS)
    queries = first_query + rows // QUERIES_PER_KV_HEAD
    is_row = (rows < TILE_QUERIES * QUERIES_PER_KV_HEAD) & (queries < num_queries)
    positions = start + queries
    heads = kv_head * QUERIES_PER_KV_HEAD + rows % QUERIES_PER_KV_HEAD
    key_columns, value_columns = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    flat_rows = (first_row + queries).to(tl.int64)
    query_tile = tl.load(
        query + flat_rows[:, None] * query_stride + heads[:, None] * KEY_DIM + key_columns[None, :],
        mask=is_row[:, None] & (key_columns[None, :] < KEY_DIM),
        other=0.0,
    )  # [TILE_ROWS, KEY_PAD]
    if WIDENS_OPERANDS:
        query_tile = query_tile.to(tl.float32)

    table = tables + tl.load(table_firsts + sequence)
    row_width = NUM_KV_HEADS * (KEY_DIM + VALUE_DIM)
    maxima = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    weights = tl.full([TILE_ROWS], 0.0, tl.float32)
    sums = tl.full([TILE_ROWS, VALUE_PAD], 0.0, tl.float32)
    num_own_units = (num_units - first_unit + NUM_SPLITS - 1) // NUM_SPLITS
    for index in range(num_own_units * UNIT_TILES):
        unit = first_unit + index // UNIT_TILES * NUM_SPLITS
        keys = (unit * UNIT_TILES + index % UNIT_TILES) * TILE_KEYS + tl.arange(0, TILE_KEYS)
        is_key = keys <= last_position
        if WINDOW > 0:
            is_key = is_key & (keys > start + first_query - WINDOW)
        block_ids = tl.load(table + keys // PAGE_TOKENS, mask=is_key, other=0)
        key_rows = (block_ids * PAGE_TOKENS + keys % PAGE_TOKENS).to(tl.int64) * row_width
        key_tile = tl.load(
            kv_rows + key_rows[None, :] + kv_head * KEY_DIM + key_columns[:, None],
            mask=is_key[None, :] & (key_columns[:, None] < KEY_DIM),
            other=0.0,
        )  # [KEY_PAD, TILE_KEYS]
        value_tile = tl.load(
            kv_rows + key_rows[:, None] + NUM_KV_HEADS * KEY_DIM + kv_head * VALUE_DIM + value_columns[None, :],
            mask=is_key[:, None] & (value_columns[None, :] < VALUE_DIM),
            other=0.0,
        )  # [TILE_KEYS, VALUE_PAD]
        if WIDENS_OPERANDS:
            key_tile = key_tile.to(tl.float32)
        scores = tl.dot(query_tile, key_tile, input_precision="ieee") * score_factor
        if IS_CAPPED:  # tanh(x) = 1 - 2 / (1 + e^2x), because not every device has a tanh
            scores = (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores))) * softcap
        visible = is_row[:, None] & is_key[None, :] & (keys[None, :] <= positions[:, None])
        if WINDOW > 0:
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_maxima = tl.maximum(maxima, tl.max(scores, axis=1))
        base = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)  # a row may have seen no key so far
        shares = tl.exp2(scores - base[:, None])
        kept = tl.exp2(maxima - base)
        weights = weights * kept + tl.sum(shares, axis=1)
        shares = shares.to(value_tile.dtype)
        if WIDENS_OPERANDS:
            shares, value_tile = shares.to(tl.float32), value_tile.to(tl.float32)
        sums = sums * kept[:, None] + tl.dot(shares, value_tile, input_precision="ieee")
        maxima = new_maxima

    num_heads = NUM_KV_HEADS * QUERIES_PER_KV_HEAD
    parts = (flat_rows * num_heads + heads) * NUM_SPLITS + split
    tl.store(part_maxima + parts, maxima, mask=is_row)
    tl.store(part_weights + parts, weights, mask=is_row)
    tl.store(
        part_sums + parts[:, None] * VALUE_DIM + value_columns[None, :],
        sums,
        mask=is_row[:, None] & (value_columns[None, :] < VALUE_DIM),
    )


@triton.jit(do_not_specialize=["num_rows", "num_sequences"], do_not_specialize_on_alignment=["lengths", "first_rows"])
def merge_parts(
    part_sums,
    part_maxima,
    part_weights,
    lengths,
    first_rows,
    output,
    num_rows,
    num_sequences,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    UNIT_KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MOST_SEQUENCES: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
):
    """Merge the results of `attend_parts` over all splits in which a row has keys.

    Args: as for `attend_parts`, and
        output: [T, NUM_HEADS, VALUE_DIM], contiguous.
        num_rows: T.
        NUM_HEADS: number of query heads.
        UNIT_KEYS: TILE_KEYS * UNIT_TILES.
        TILE_OUTPUTS: heads per program; the heads of a row are consecutive.
    """
    outputs = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_output = outputs < num_rows * NUM_HEADS
    rows = outputs // NUM_HEADS
    sequences = tl.arange(0, MOST_SEQUENCES)
    is_sequence = sequences < num_sequences
    starts = tl.load(first_rows + sequences, mask=is_sequence, other=0)
    begun = is_sequence[None, :] & (starts[None, :] <= rows[:, None])
    sequence = tl.sum(begun.to(tl.int32), axis=1) - 1  # [TILE_OUTPUTS]
    length = tl.load(lengths + sequence, mask=is_output, other=0).to(tl.int32)
    positions = length - tl.load(first_rows + sequence + 1, mask=is_output, other=0) + rows

    splits = tl.arange(0, NUM_SPLITS)
    first_units, num_units = _own_units(
        positions[:, None], positions[:, None], splits[None, :], WINDOW, UNIT_KEYS, NUM_SPLITS
    )
    has_keys = is_output[:, None] & (first_units < num_units)
    parts = outputs.to(tl.int64)[:, None] * NUM_SPLITS + splits[None, :]
    maxima = tl.load(part_maxima + parts, mask=has_keys, other=float("-inf"))
    weights = tl.load(part_weights + parts, mask=has_keys, other=0.0)
    top = tl.max(maxima, axis=1)
    shares = tl.exp2(maxima - tl.where(top == float("-inf"), 0.0, top)[:, None])
    columns = tl.arange(0, VALUE_PAD)
    is_column = columns < VALUE_DIM
    sums = tl.load(
        part_sums + parts[:, :, None] * VALUE_DIM + columns[None, None, :],
        mask=has_keys[:, :, None] & is_column[None, None, :],
        other=0.0,
    )  # [TILE_OUTPUTS, NUM_SPLITS, VALUE_PAD]
    total = tl.sum(weights * shares, axis=1)
    means = tl.sum(sums * shares[:, :, None], axis=1) / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        output + outputs.to(tl.int64)[:, None] * VALUE_DIM + columns[None, :],
        means.to(output.dtype.element_ty),
        mask=is_output[:, None] & is_column[None, :],
    )
