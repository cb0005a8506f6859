"""The Triton kernel between two draft steps: the token that was drawn becomes the next step's input.

Not here: launching it (`engine.cuda_graphs.multi_step`). Imports Triton, so it is imported only where that is.
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
    """One position further, for the sequences that are not padding.

    Args:
        drawn: int64 [num_sequences], the tokens.
        token_ids: int64 [B], of a step of one row a sequence, as are the next ones.
        positions: int64 [B].
        slots: int64 [B], where the row's keys and values go.
        opened_blocks: int64 [B], that are cleared first; from now on none is.
        lengths: int64 [B], keys of each sequence.
        firsts: int64 [B], where its block ids begin.
        tables: int64, the block ids.
        num_sequences: at most B.
        scratch_block: stands for no block.
        PAGE_TOKENS: tokens of a block.
        TILE: at least B; a power of two.
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
