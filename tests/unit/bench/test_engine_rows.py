"""Rows of the suite `engines` from given batches."""

from __future__ import annotations

from functools import partial

import pytest

from bench.harness.rows import Origin, Row
from bench.suites.engines.backends import above_pass_row
from bench.suites.engines.draft_pool import longest_pause_ms
from bench.suites.engines.turns import num_equal_texts
from bench.suites.peers.figures import Batch, ratio_row
from bench.systems.process import Answer

make_row = partial(Row, suite="engines", row=None, case="case", origin=Origin("two cores", "commit", "date"))


def batch(token_ids: list[int], step_s: float) -> Batch:
    """Return a stream with a token a step."""
    chunk_s = [step_s * (place + 1) for place in range(len(token_ids))]
    return Batch([[1]], [Answer(token_ids, chunk_s, [1] * len(token_ids))], cpu_s=0.1)


BATCHES = {
    "ours": [batch([1, 2, 3], 0.02), batch([1, 2, 4], 0.03)],
    "theirs": [batch([1, 2, 3], 0.01), batch([1, 2, 3], 0.02)],
}


def test_a_ratio_falls_short_where_the_whole_interval_is_below_what_is_required() -> None:
    row = ratio_row(make_row, BATCHES, "ours", "theirs", required=1.0)
    assert row.value == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert row.falls_short
    assert not ratio_row(make_row, BATCHES, "theirs", "ours", required=1.0).falls_short


def test_a_round_costs_its_time_above_a_token_of_the_engine_itself() -> None:
    row = above_pass_row(make_row, BATCHES["ours"], BATCHES["theirs"])
    assert (row.value, row.unit) == (pytest.approx(10.0), "ms")


def test_texts_are_compared_stream_by_stream() -> None:
    assert num_equal_texts(BATCHES, "ours", "theirs") == (1, 2)


def test_a_pause_is_the_longest_step_above_the_usual_one_after_it() -> None:
    assert longest_pause_ms([0.01, 0.02, 0.08, 0.09, 0.1, 0.112]) == pytest.approx(50.0)
