"""Rows as they are kept: their JSON, their verdict, their table and their plots."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.harness.plots import write_plots
from bench.harness.report import print_table
from bench.harness.rows import Origin, Row, read_json, write_json

FIELDS = [
    "suite",
    "row",
    "case",
    "system",
    "metric",
    "value",
    "unit",
    "ratio_to",
    "hardware",
    "commit",
    "date",
    "simulated",
]

ORIGIN = Origin(hardware="2 cores, a processor", commit="abc123", date="2026-01-02T03:04:05Z")


def a_row(**changes: object) -> Row:
    fields = {"suite": "latency", "row": None, "case": "one stream", "system": "ours", "metric": "tokens_per_s"}
    return Row(**({"value": 1.5, "unit": "tokens/s", "origin": ORIGIN} | fields | changes))


def a_ratio(**changes: object) -> Row:
    fields = {"metric": "tokens_per_s_ratio", "unit": "x", "ratio_to": "peer", "num_pairs": 9, "row": 0}
    return a_row(**(fields | {"low": 1.2, "high": 1.8, "required": 1.0} | changes))


def test_the_kept_file_is_a_list_of_flat_objects_with_every_agreed_field(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "latency.json"
    write_json([a_row(), a_ratio()], path)
    kept = json.loads(path.read_text())
    assert len(kept) == 2
    for entry in kept:
        assert set(FIELDS) <= set(entry)
        assert not any(isinstance(value, dict | list) for value in entry.values())
    assert kept[0]["row"] is None
    assert kept[1]["row"] == 0
    assert kept[1]["ratio_to"] == "peer"
    assert kept[0]["commit"] == "abc123"
    assert read_json(path) == [a_row(), a_ratio()]


def test_this_machine_and_this_commit_have_names() -> None:
    origin = Origin()
    assert "cores" in origin.hardware
    assert origin.commit
    assert origin.date.endswith("Z")


@pytest.mark.parametrize(
    ("low", "high", "short"), [(1.2, 1.8, False), (0.8, 1.1, False), (0.7, 0.9, True), (None, None, False)]
)
def test_a_row_falls_short_only_when_its_whole_interval_does(
    low: float | None, high: float | None, short: bool
) -> None:
    assert a_ratio(low=low, high=high).falls_short is short


def test_a_row_without_a_requirement_never_falls_short() -> None:
    assert not a_ratio(required=None, low=0.1, high=0.2).falls_short


def test_the_table_shows_the_interval_the_verdict_and_the_origin() -> None:
    text = io.StringIO()
    print_table([a_row(), a_ratio(low=0.5, high=0.75, value=0.6)], Console(file=text, width=200))
    shown = text.getvalue()
    assert "0.5 to 0.75 (9)" in shown
    assert "SHORT" in shown
    assert "abc123" in shown
    assert "quick" not in shown


def test_a_quick_run_and_a_simulated_figure_are_named_as_such() -> None:
    text = io.StringIO()
    print_table([a_row(quick=True, simulated=True)], Console(file=text, width=200))
    assert "quick" in text.getvalue()
    assert "(simulated)" in text.getvalue()


def test_a_sweep_shows_its_place_a_band_both_ends_and_a_note_stands_under_the_table_once() -> None:
    text = io.StringIO()
    rows = [a_row(x=streams, x_name="streams", note="One device for both.") for streams in (1, 64)]
    print_table([*rows, a_row(metric="alpha", required=0.75, at_most=0.85)], Console(file=text, width=200))
    shown = text.getvalue()
    assert "at 64 streams" in shown
    assert ">= 0.75 <= 0.85 SHORT" in shown
    assert shown.count("One device for both.") == 1


def test_ratios_and_shared_metrics_are_plotted_and_lone_figures_are_not(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [a_row(), a_row(system="peer"), a_ratio(), a_row(metric="alpha", unit="of tested")]
    written = write_plots(rows, tmp_path / "plots")
    assert {path.name for path in written} == {"latency_tokens_per_s.png", "latency_tokens_per_s_ratio.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_a_cost_falls_short_when_it_lies_above_what_it_may_be() -> None:
    assert not a_row(row=11, metric="bytes_per_round", value=2_900.0, at_most=2_900.0).falls_short
    assert a_row(row=11, metric="bytes_per_round", value=2_901.0, at_most=2_900.0).falls_short
    assert not a_row(row=11, value=3_000.0, low=2_800.0, high=3_200.0, at_most=2_900.0).falls_short
