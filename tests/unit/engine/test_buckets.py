"""The step sizes that are recorded as CUDA graphs, and the choice of one for a step."""

from __future__ import annotations

import random

import pytest

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice
from specdec.engine.cuda_graphs.buckets import Bucket, Buckets, ContextSteps
from specdec.engine.options import row_counts

GATHERED = ContextSteps(first_tokens=512, growth=4, most_tokens=1 << 17)
WIDTHS = (1, 2, 3, 5, 9)


def step(*sizes: tuple[int, int]) -> list[SequenceSlice]:
    """Return slices from (first position, number of tokens) of each sequence."""
    return [SequenceSlice((5,) * count, start, (), 1) for start, count in sizes]


def holds(bucket: Bucket, slices: list[SequenceSlice]) -> bool:
    return (
        bucket.num_sequences >= len(slices)
        and bucket.width >= max(len(piece.token_ids) for piece in slices)
        and bucket.num_blocks * BLOCK_TOKENS >= max(piece.start + len(piece.token_ids) for piece in slices)
    )


@pytest.mark.parametrize("steps", [GATHERED, None])
def test_a_step_runs_in_the_smallest_bucket_that_holds_it(steps: ContextSteps | None) -> None:
    rng = random.Random(1)
    buckets = Buckets(WIDTHS, steps, 9000)
    every = buckets.largest_first()
    for _ in range(300):
        slices = step(*((rng.randrange(8900), rng.randint(1, 10)) for _ in range(rng.choice((1, 1, 2, 5, 30, 70)))))
        fitting = [bucket for bucket in every if holds(bucket, slices)]
        chosen = buckets.smallest_for(slices)
        if not fitting:
            assert chosen is None
            continue
        assert chosen in fitting
        assert all(
            bucket.num_blocks > chosen.num_blocks
            or bucket.num_sequences > chosen.num_sequences
            or bucket.width >= chosen.width
            for bucket in fitting
        )


def test_the_largest_context_is_rounded_up_to_whole_blocks() -> None:
    buckets = Buckets((1,), GATHERED, 1001)
    assert {bucket.num_blocks for bucket in buckets.largest_first()} == {32, 63}
    assert buckets.smallest_for(step((1000, 1))) == Bucket(1, 1, 63)
    assert buckets.smallest_for(step((512, 1))) == Bucket(1, 1, 63)
    assert buckets.smallest_for(step((511, 1))) == Bucket(1, 1, 32)


def test_rows_gathered_contexts_and_the_number_of_graphs_are_bounded() -> None:
    for context in (40, 2048, 8192, 131_072):
        every = Buckets(WIDTHS, GATHERED, context).largest_first()
        assert max(bucket.num_rows for bucket in every) <= 512
        assert max(bucket.num_sequences * bucket.num_blocks * BLOCK_TOKENS for bucket in every) <= 1 << 17
        assert len(every) <= 120
        assert Bucket(1, 9, -(-context // BLOCK_TOKENS)) in every


@pytest.mark.parametrize("context", [40, 8192, 131_072])
def test_without_context_steps_one_bucket_per_size_serves_every_context(context: int) -> None:
    """The numbers of graphs of a target with gamma up to 16 and of its draft, which bound start time and memory."""
    assert len(Buckets(row_counts(17), None, context).largest_first()) == 39 <= 45
    assert len(Buckets(row_counts(2), None, context).largest_first()) == 14
    assert len(Buckets(row_counts(17), GATHERED, 8192).largest_first()) == 108


def test_a_service_without_widths_records_nothing() -> None:
    buckets = Buckets((), GATHERED, 1000)
    assert buckets.largest_first() == []
    assert buckets.smallest_for(step((0, 1))) is None
