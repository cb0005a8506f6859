"""What the suite `crowd` makes of batches, and the ideal that it compares simulated targets with."""

from __future__ import annotations

from functools import partial

import pytest

from bench.harness.rows import Origin, Row
from bench.suites.crowd.costs import PROGRAMS, Batch, batch_rows
from bench.systems.simulated import ideal_crowd_tokens_per_s, ideal_tokens_per_s
from bench.systems.text_streams import TextStream
from specdec.engine.simulated.simulated_pair import simulated_pair

ORIGIN = Origin(hardware="2 cores, a processor", commit="abc123", date="2026-01-02T03:04:05Z")
ROW = partial(Row, suite="crowd", case="a pair", system="specdec_alone", origin=ORIGIN)
PAIR = simulated_pair("simulated:70b-1b,predraft=off")


def batch(*streams: list[float], cpu_s: float = 0.0) -> Batch:
    runs = [TextStream("s", chunk_s, chunk_s[-1], 100, "text") for chunk_s in streams]
    return Batch(1.0, runs, dict.fromkeys(PROGRAMS, cpu_s))


def test_only_gaps_while_all_streams_run_count() -> None:
    assert batch([0.0, 1.0, 1.5, 2.5], [1.0, 1.25, 2.0]).gaps_s == [0.5, 0.25, 0.75]


def test_processor_time_is_told_by_program_and_limited_in_sum() -> None:
    rows = {row.metric: row for row in batch_rows(ROW, [batch([0.0, 1.0], cpu_s=0.01)], 299.0, None)}
    assert [rows[f"{name}_cpu_us"].value for name in PROGRAMS] == [pytest.approx(100.0)] * 3
    assert rows["all_cpu_us"].value == pytest.approx(300.0)
    assert rows["all_cpu_us"].falls_short
    assert "gap_p99" not in rows


def test_a_stream_that_stops_for_long_falls_short() -> None:
    steady, stopped = batch([0.0, 1.0, 2.0, 3.0]), batch([0.0, 1.0, 2.0, 12.0])
    short = [batch_rows(ROW, [each], None, 2.0)[-1].falls_short for each in (steady, stopped)]
    assert short == [False, True]


def test_the_ideal_has_every_stream_in_every_step() -> None:
    assert ideal_crowd_tokens_per_s(PAIR, 1) == pytest.approx(1 / 18.5e-3)
    assert ideal_crowd_tokens_per_s(PAIR, 5) == pytest.approx(5 / 20e-3)
    assert ideal_crowd_tokens_per_s(PAIR, 1, 4) == pytest.approx(ideal_tokens_per_s(PAIR, 4))


def test_a_simulated_step_can_have_another_length() -> None:
    assert ideal_crowd_tokens_per_s(simulated_pair("simulated:8b-0.6b,step_ms=1"), 64) == pytest.approx(64_000)
