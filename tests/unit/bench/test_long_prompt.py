"""Gaps between chunks while a prompt is read."""

from __future__ import annotations

import pytest

from bench.harness.streams import StreamRun
from bench.suites.orchestration.long_prompt import gap_p99_s


def run(*chunk_s: float) -> StreamRun:
    return StreamRun(began_s=0.0, chunk_s=list(chunk_s), chunk_tokens=[1] * len(chunk_s), stats={})


def test_only_gaps_that_overlap_the_stretch_count() -> None:
    runs = [run(0.0, 5.0, 5.5, 6.0, 9.0), run(1.0, 1.5)]
    assert gap_p99_s(runs, 5.2, 5.8) == pytest.approx(0.5)
    assert gap_p99_s(runs, 5.2, 6.1) == pytest.approx(3.0, rel=0.02)


def test_a_gap_that_begins_before_the_stretch_counts_whole() -> None:
    assert gap_p99_s([run(0.0, 5.0)], 4.9, 10.0) == pytest.approx(5.0)
