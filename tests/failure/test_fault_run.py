"""Generations on a whole system under kills, stops and stepped clocks: all end, and nothing is lost or doubled.

The full run has 1,000 of them (`make test-failure`); the short one is a slice of it. `SPECDEC_FAULT_SEED` repeats a
run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fault_run import FaultSystem, fault_seed, run_with_faults
from tests.support.tiny_models import build_tiny_pair


@pytest.fixture
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultSystem]:
    models: tuple[Path, Path] = build_tiny_pair("llama", tmp_path_factory.mktemp("models"), context=1024)
    with FaultSystem(models, tmp_path_factory.mktemp("redis")) as system:
        yield system


@pytest.mark.timeout(900)
async def test_a_few_generations_end_whole_under_kills_stops_and_stepped_clocks(system: FaultSystem) -> None:
    seed = fault_seed()
    report = await run_with_faults(system, seed, num_generations=8, num_kinds=8, most_tokens=128, pause_s=(0.5, 1.5))
    assert not report.problems, f"SPECDEC_FAULT_SEED={seed}: {report.problems}"
    assert report.num_ended == 8


@pytest.mark.full
@pytest.mark.timeout(2700)
async def test_a_thousand_generations_end_whole_under_kills_stops_and_stepped_clocks(system: FaultSystem) -> None:
    seed = fault_seed()
    report = await run_with_faults(
        system, seed, num_generations=1000, num_kinds=64, most_tokens=256, pause_s=(1.0, 3.0)
    )
    print(f"{report.num_kills} kills, {report.num_stops} stops, {report.num_clock_steps} steps of clocks")
    assert not report.problems, f"SPECDEC_FAULT_SEED={seed}: {report.problems[:20]}"
    assert report.num_ended == 1000
