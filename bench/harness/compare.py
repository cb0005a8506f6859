"""`python -m bench compare OLD NEW`: list the figures of two kept runs that moved by more than their noise.

A ratio moved when its two intervals do not overlap. A figure without an interval moved when it changed by more than
`DRIFT`, the drift of a shared machine by itself.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

#: Relative change below which a figure without an interval counts as unmoved.
DRIFT = 0.15

Key = tuple[str, str, str, str, str, float | None]


@dataclass(frozen=True)
class Change:
    """One figure that both runs have."""

    key: Key
    """suite, case, system, metric, against, place in a sweep."""
    old: float
    new: float
    moved: bool
    """True when the change exceeds the noise."""


def compare(old: list[dict], new: list[dict]) -> tuple[list[Change], list[Key], list[Key]]:
    """Pairs the figures of two runs.

    Args:
        old: rows as `bench.harness.rows.write_json` keeps them.
        new: likewise.

    Returns:
        The changes, then the figures that only the old and only the new run has.
    """
    before, after = ({_key(row): row for row in rows} for rows in (old, new))
    changes = [
        Change(key, before[key]["value"], row["value"], _moved(before[key], row))
        for key, row in after.items()
        if key in before
    ]
    return changes, [key for key in before if key not in after], [key for key in after if key not in before]


def _key(row: dict) -> Key:
    return row["suite"], row["case"], row["system"], row["metric"], row["ratio_to"] or "", row.get("x")


def _moved(old: dict, new: dict) -> bool:
    if old["low"] is not None and new["low"] is not None:
        return bool(old["high"] < new["low"] or new["high"] < old["low"])
    return abs(new["value"] - old["value"]) > DRIFT * abs(old["value"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the two files."""
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")


def run(arguments: argparse.Namespace) -> int:
    """Prints what moved; returns the exit code."""
    changes, gone, added = compare(*(json.loads(path.read_text()) for path in (arguments.old, arguments.new)))
    table = Table(title=f"{arguments.old} to {arguments.new}: moved beyond noise")
    for heading in ("case", "system", "metric", "against", "at"):
        table.add_column(heading)
    for heading in ("old", "new", "change"):
        table.add_column(heading, justify="right")
    moved = [change for change in changes if change.moved]
    for change in moved:
        ratio = f"{change.new / change.old - 1:+.1%}" if change.old else ""
        *words, place = change.key[1:]
        table.add_row(*words, "" if place is None else f"{place:g}", f"{change.old:.4g}", f"{change.new:.4g}", ratio)
    console = Console()
    if moved:
        console.print(table)
    console.print(f"{len(moved)} of {len(changes)} figures moved, {len(gone)} are gone, {len(added)} are new")
    return 0
