"""Two kept runs: what moved beyond noise, what is gone, what is new."""

import json
from pathlib import Path

import pytest

from bench.__main__ import SUITES, main
from bench.harness.compare import compare


def kept(value: float, low: float | None = None, high: float | None = None, **changes: object) -> dict:
    row = {"suite": "latency", "case": "one", "system": "ours", "metric": "x", "ratio_to": "peer"}
    return row | {"value": value, "low": low, "high": high} | changes


@pytest.mark.parametrize(
    ("old", "new", "moved"),
    [
        (kept(1.0, 0.9, 1.1), kept(1.15, 1.05, 1.25), False),
        (kept(1.0, 0.9, 1.1), kept(1.3, 1.2, 1.4), True),
        (kept(1.0), kept(1.1), False),
        (kept(1.0), kept(0.8), True),
    ],
)
def test_a_figure_moved_when_its_intervals_part_or_it_changed_by_more_than_drift(
    old: dict, new: dict, moved: bool
) -> None:
    changes, gone, added = compare([old], [new])
    assert [change.moved for change in changes] == [moved]
    assert not gone
    assert not added


def test_figures_of_one_run_alone_are_named() -> None:
    changes, gone, added = compare([kept(1.0, case="old")], [kept(1.0, case="new")])
    assert not changes
    assert gone[0][1] == "old"
    assert added[0][1] == "new"


def test_the_places_of_a_sweep_are_figures_of_their_own() -> None:
    sweep = [kept(1.0, x=1), kept(5.0, x=2)]
    changes, gone, added = compare(sweep, [sweep[0], kept(9.0, x=2)])
    assert [change.moved for change in changes] == [False, True]
    assert not gone
    assert not added


def test_the_command_reads_two_files_and_says_how_many_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, row in (("old", kept(1.0, 0.9, 1.1)), ("new", kept(2.0, 1.9, 2.1))):
        (tmp_path / name).write_text(json.dumps([row]))
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert "1 of 1 figures moved" in capsys.readouterr().out


def test_the_list_says_of_every_suite_what_it_shows_and_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert [(name, minutes) for name, minutes, _, _ in listed] == [(name, str(m)) for name, (_, m) in SUITES.items()]
    assert all(shown.endswith(".") for *_, shown in listed)
