"""Grouping of slices, and their masks and KV slots."""

from __future__ import annotations

import torch

from specdec.engine.base import SequenceSlice, StepPlan
from specdec.engine.model.batch import MAX_GROUPED_ROWS, AttentionKind, StepBatch, build_batch

PLAIN = AttentionKind(window=None, queries_per_kv_head=1, softcap=None)


def build(*slices: SequenceSlice, kinds: tuple[AttentionKind, ...] = (PLAIN,)) -> StepBatch:
    return build_batch(StepPlan(slices), kinds, dtype=torch.float32, device=torch.device("cpu"))


def scattered(count: int, start: int, first_block: int = 0, num_logit_rows: int = 1) -> SequenceSlice:
    num_blocks = -(-(start + count) // 16)
    return SequenceSlice(
        tuple(range(count)), start, tuple(range(first_block, first_block + 2 * num_blocks, 2)), num_logit_rows
    )


def test_every_token_goes_to_the_slot_of_its_position() -> None:
    batch = build(SequenceSlice((7, 8, 9), 15, (5, 2), 3))
    assert batch.slots.tolist() == [5 * 16 + 15, 2 * 16, 2 * 16 + 1]
    assert batch.position_ids.tolist() == [[15, 16, 17]]
    assert batch.token_ids.tolist() == [[7, 8, 9]]


def test_a_step_opens_a_block_if_it_writes_the_first_slot_but_not_the_last() -> None:
    assert build(scattered(1, 40), scattered(4, 33, 20)).opened_blocks is None
    assert build(scattered(32, 0)).opened_blocks is None
    batch = build(scattered(1, 32), scattered(20, 14, 20), scattered(3, 14, 40), scattered(33, 0, 60))
    assert sorted(batch.opened_blocks.tolist()) == [4, 24, 42, 64]


def test_draft_steps_and_verifications_of_many_sequences_are_two_groups() -> None:
    steps = [scattered(1, 40 + i, 10 * i) for i in range(6)]
    checks = [scattered(5, 50 + i, 100 + 10 * i) for i in range(6)]
    batch = build(*[piece for pair in zip(steps, checks, strict=True) for piece in pair])
    assert sorted((group.batch, group.num_queries) for group in batch.groups) == [(6, 1), (6, 5)]
    assert all(group.pad_index is None for group in batch.groups)


def test_logit_rows_have_the_order_of_the_plan_for_any_grouping() -> None:
    batch = build(scattered(5, 50, num_logit_rows=2), scattered(1, 50, 20), scattered(5, 48, 40, num_logit_rows=1))
    tokens, positions = batch.token_ids[0][batch.logit_rows], batch.position_ids[0][batch.logit_rows]
    assert list(zip(tokens.tolist(), positions.tolist(), strict=True)) == [(3, 53), (4, 54), (0, 50), (4, 52)]


def test_groups_cover_the_flat_batch_without_gap_or_overlap() -> None:
    lengths = [1, 3, MAX_GROUPED_ROWS + 1, 1, 7, 2, 20, 1]
    batch = build(*[scattered(n, 37 * i, 100 * i) for i, n in enumerate(lengths)])
    next_row = 0
    for group in batch.groups:
        assert group.first_row == next_row
        next_row += group.num_rows
    assert next_row == sum(lengths) == batch.token_ids.shape[1]


def test_long_chunks_are_groups_of_their_own() -> None:
    batch = build(scattered(MAX_GROUPED_ROWS + 1, 16), scattered(MAX_GROUPED_ROWS + 1, 16, 50))
    assert [(group.batch, group.num_queries) for group in batch.groups] == [(1, 33), (1, 33)]


def test_sequences_of_very_different_length_are_not_padded_to_each_other() -> None:
    batch = build(scattered(1, 10), scattered(1, 2000, 10))
    assert sorted(group.views[0].length for group in batch.groups) == [11, 2016]


def test_a_padding_query_repeats_a_real_one_and_its_output_is_dropped() -> None:
    batch = build(scattered(2, 40), scattered(3, 40, 20))
    (group,) = batch.groups
    assert group.pad_index.tolist() == [0, 1, 1, 2, 3, 4]
    assert group.unpad_index.tolist() == [0, 1, 3, 4, 5]


def test_a_single_draft_step_over_adjacent_blocks_needs_neither_mask_nor_copy() -> None:
    (group,) = build(SequenceSlice((1,), 40, (3, 4, 5), 1)).groups
    view = group.views[0]
    assert (view.mask, view.block_ids, view.run_start, view.length) == (None, None, 48, 41)


def test_a_whole_prompt_uses_a_causal_mask_and_reads_no_cache() -> None:
    assert build(scattered(20, 0)).groups[0].views == (None,)
    softcapped = AttentionKind(window=None, queries_per_kv_head=1, softcap=30.0)
    windowed = AttentionKind(window=8, queries_per_kv_head=1, softcap=None)
    assert all(view.mask is not None for view in build(scattered(20, 0), kinds=(softcapped, windowed)).groups[0].views)


def test_a_window_reads_only_its_blocks_and_masks_the_other_positions() -> None:
    window = AttentionKind(window=20, queries_per_kv_head=2, softcap=None)
    (group,) = build(scattered(2, 100, 0), kinds=(window,)).groups
    view = group.views[0]
    assert view.block_ids.tolist() == [10, 12]  # positions 80 on; the first query sees from 81
    visible = view.mask[0, 0] == 0
    assert visible.shape == (4, 32)
    for row, position in enumerate((100, 100, 101, 101)):
        assert [80 + place for place in visible[row].nonzero().ravel().tolist()] == list(
            range(position - 19, position + 1)
        )


def test_chunks_read_only_their_blocks_and_mask_the_other_positions() -> None:
    chunks = AttentionKind(window=None, queries_per_kv_head=1, softcap=None, chunk=40)
    (group,) = build(scattered(4, 118, 0), kinds=(chunks,)).groups
    view = group.views[0]
    assert view.block_ids.tolist() == [10, 12, 14]  # positions 80 on; two queries see from 80, two from 120
    visible = view.mask[0, 0] == 0
    seen = [[80 + place for place in row.nonzero().ravel().tolist()] for row in visible]
    assert seen == [list(range(80, 119)), list(range(80, 120)), [120], [120, 121]]
