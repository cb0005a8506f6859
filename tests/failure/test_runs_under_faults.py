"""Generations without drafts, so in runs of the target, under kills, stops and hangs: none loses or doubles a token.

Without a draft the text of every mode is decided by prompt, parameters and seed, so each of them must be the same as on
the undisturbed system. The full run has 1,000 of them (`make test-failure`); `SPECDEC_FAULT_SEED` repeats a run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fault_run import FaultSystem, fault_seed, run_with_faults
from tests.support.tiny_models import build_tiny_pair

#: By which a step takes longer, so that faults meet steps of runs and not only the time between two of them.
SLOWER_BY_S = 0.01


@pytest.mark.parametrize(
    ("num_generations", "num_kinds", "pause_s"),
    [
        pytest.param(12, 10, (0.2, 0.8), marks=pytest.mark.timeout(900)),
        pytest.param(1000, 64, (0.5, 2.0), marks=[pytest.mark.full, pytest.mark.timeout(2700)]),
    ],
)
async def test_generations_in_runs_end_with_the_same_text_under_kills_stops_and_hangs(
    num_generations: int, num_kinds: int, pause_s: tuple[float, float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    models: tuple[Path, Path] = build_tiny_pair("llama", tmp_path_factory.mktemp("models"), context=1024)
    seed = fault_seed()
    with FaultSystem(models, tmp_path_factory.mktemp("redis"), num_drafts=0, slower_by_s=SLOWER_BY_S) as system:
        report = await run_with_faults(
            system, seed, num_generations=num_generations, num_kinds=num_kinds, most_tokens=128, pause_s=pause_s
        )
    print(f"{report.num_kills} kills, {report.num_stops} stops, {report.num_hangs} hangs")
    assert not report.problems, f"SPECDEC_FAULT_SEED={seed}: {report.problems[:20]}"
    assert report.num_ended == num_generations
    assert report.num_kills + report.num_stops + report.num_hangs > 0
