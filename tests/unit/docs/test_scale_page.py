"""Figures of docs/scale.md are those of bench/results/autoscaling.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "scale.md").read_text()
ROWS = json.loads((ROOT / "bench" / "results" / "autoscaling.json").read_text())

#: Words of the table's rows, with the metric, and the digits behind the point.
TRACE_FIGURES = [
    ("requests that held both limits", "slo_held", 1),
    ("first token in 1 s", "ttft_within_1000_ms", 1),
    ("further tokens in 15 ms", "tpot_within_15_ms", 1),
    ("seconds in which most requests missed a limit", "slo_missed_s", 0),
    ("time with targets within 1 of the plan of the moment", "targets_within_one_of_plan", 1),
    ("largest difference of targets from the plan", "targets_beside_plan", 0),
    ("largest difference of drafts from the plan", "drafts_beside_plan", 0),
    ("largest difference of coordinators from the plan", "coordinators_beside_plan", 0),
    ("reversals of the number of targets", "target_reversals", 0),
]


def cells(beginning: str) -> list[str]:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {beginning}")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def value_of(metric: str, case: str = "", system: str = "") -> float:
    """Return the newest value; several kinds of autoscalers have to agree."""
    (value,) = {
        row["value"]
        for row in ROWS
        if row["metric"] == metric and row["case"].startswith(case) and row["system"].startswith(system)
    }
    return float(value)


@pytest.mark.parametrize(("words", "metric", "digits"), TRACE_FIGURES)
def test_the_table_of_traces_has_the_simulated_figures(words: str, metric: str, digits: int) -> None:
    shown = [cell.removesuffix(" %") for cell in cells(words)]
    values = [value_of(metric, case) for case in ("step 20 to 40/s", "ramp 10 to 40/s")]
    assert shown == [f"{value:.{digits}f}" for value in values]


@pytest.mark.parametrize(
    "part",
    ["one Redis: commits", "one Redis: reads of the registry", "coordinator: checks", "replica: checks by"],
)
def test_the_table_of_limits_has_the_calculated_loads(part: str) -> None:
    assert cells(part)[-1] == f"{value_of('breaks_at', system=part):,.0f}/s"


@pytest.mark.parametrize(
    ("metric", "replicas"),
    [("target_roots_of_calls", 2), ("target_roots_of_calls", 4), ("target_calls", 3), ("draft_calls", 4)],
)
def test_the_signals_of_the_page_are_simulated_ones(metric: str, replicas: int) -> None:
    (value,) = [row["value"] for row in ROWS if row["metric"] == metric and row["x"] == replicas]
    assert f"{value:.1f}" in PAGE


def test_every_figure_of_the_traces_says_that_it_is_simulated() -> None:
    for words, _, _ in TRACE_FIGURES:
        assert f"| {words}, simulated |" in PAGE


def test_the_parts_are_in_the_order_in_which_they_break() -> None:
    table = PAGE[PAGE.index("| Part |") :]
    loads = [int(load.replace(",", "")) for load in re.findall(r"([\d,]+)/s \|$", table, re.MULTILINE)]
    assert loads == sorted(loads)
    assert len(loads) == 4
