"""The Triton kernel between two draft steps: it makes the drawn token the next step's input.

This module imports Triton, so `engine.cuda_graphs.capture` imports it when it launches the kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["num_sequences", "scratch_block"],
    do_not_specialize_on_alignment=["drawn", "token_ids", "positions", "slots", "opened_blocks", "lengths", "firsts"],
)
def advance(
    drawn,
    token_ids,
    positions,
    slots,
    opened_blocks,
    lengths,
    firsts,
    tables,
    num_sequences,
    scratch_block,
    PAGE_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Move each sequence that is not padding one position on.

    Args:
        drawn: int64 [num_sequences]: the drawn tokens.
        token_ids: int64 [B]: inputs of a step with one row per sequence, as are the next five.
        positions: int64 [B].
        slots: int64 [B]: KV slot of each row.
        opened_blocks: int64 [B]: blocks that a step clears first; set to the scratch block, so none is cleared.
        lengths: int64 [B]: number of keys of each sequence.
        firsts: int64 [B]: index of each sequence's first block id in `tables`.
        tables: int64: block ids.
        num_sequences: number of sequences that are not padding, at most B.
        scratch_block: block that no sequence has.
        PAGE_TOKENS: tokens per block.
        TILE: power of two, at least B.
    """
    places = tl.arange(0, TILE)
    is_own = places < num_sequences
    position = tl.load(positions + places, mask=is_own, other=0) + 1
    first = tl.load(firsts + places, mask=is_own, other=0)
    block = tl.load(tables + first + position // PAGE_TOKENS, mask=is_own, other=0)
    tl.store(token_ids + places, tl.load(drawn + places, mask=is_own, other=0), mask=is_own)
    tl.store(positions + places, position, mask=is_own)
    tl.store(slots + places, block * PAGE_TOKENS + position % PAGE_TOKENS, mask=is_own)
    tl.store(opened_blocks + places, tl.zeros_like(position) + scratch_block, mask=is_own)
    tl.store(lengths + places, tl.load(lengths + places, mask=is_own, other=0) + 1, mask=is_own)
