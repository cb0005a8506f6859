"""Show a progress bar while a suite runs, and a table and plots afterwards.

Called by `__main__` and, for progress, by the suites.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from bench.rows import Row

_PIPE_WIDTH = 160


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr for the length of the block; yields the function that advances it by one."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def waiting(label: str) -> Iterator[None]:
    """Show on stderr, for the length of the block, what is waited for and for how long already."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{label} …", highlight=False)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        bar.add_task(label, total=None)
        yield


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print one line a row, and under them where and when they were measured."""
    if console is None:
        # A file or a pipe has no width; folding cells to 80 columns would make them unreadable.
        console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    table = Table(title=f"bench {rows[0].suite}" + (" (quick: too few pairs to keep)" if rows[0].quick else ""))
    for heading in ("row", "case", "system", "metric"):
        table.add_column(heading)
    for heading in ("value", "unit", "95 % interval (pairs)", "against", "required"):
        table.add_column(heading, justify="right")
    for row in rows:
        style = "red" if row.falls_short else ("bold" if row.row is not None else None)
        metric = row.metric if row.x is None else f"{row.metric} at {row.x:g} {row.x_name}"
        metric += " (simulated)" if row.simulated else ""
        number = "" if row.row is None else str(row.row)
        interval = "" if row.low is None or row.high is None else f"{row.low:.3g} to {row.high:.3g} ({row.num_pairs})"
        required = _required(row) + (" SHORT" if row.falls_short else "")
        cells = (number, row.case, row.system, metric, f"{row.value:.4g}", row.unit, interval)
        table.add_row(*cells, row.ratio_to or "", required, style=style)
    console.print(table)
    for note in dict.fromkeys(row.note for row in rows if row.note):
        console.print(note)
    origin = rows[0].origin
    console.print(f"{origin.hardware} · commit {origin.commit} · {origin.date}")


def _required(row: Row) -> str:
    least = "" if row.required is None else f">= {row.required:g}"
    most = "" if row.at_most is None else f"<= {row.at_most:g}"
    return " ".join(filter(None, (least, most)))


def write_plots(rows: Sequence[Row], directory: Path) -> list[Path]:
    """One PNG per metric: lines where it was swept, else a bar per system and case where there is more than one.

    Returns:
        The files written. Needs the `bench` extra (matplotlib).
    """
    import matplotlib

    matplotlib.use("Agg")

    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for metric in dict.fromkeys(row.metric for row in rows):
        of_metric = [row for row in rows if row.metric == metric]
        bars = [row for row in of_metric if row.x is None]
        if len(bars) > 1 or (bars and bars[0].ratio_to is not None):
            written.append(_plot(bars, directory / f"{bars[0].suite}_{metric}.png", _draw_bars, 1.2 + 0.5 * len(bars)))
        for x_name in dict.fromkeys(row.x_name for row in of_metric if row.x is not None):
            lines = [row for row in of_metric if row.x_name == x_name]
            path = directory / f"{lines[0].suite}_{metric}_by_{x_name}.png"
            written.append(_plot(lines, path, _draw_lines, 4.5))
    return written


def _plot(rows: Sequence[Row], path: Path, draw: Callable[[Any, Sequence[Row]], None], height: float) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, height), layout="constrained")
    draw(axes, rows)
    cases = {row.case for row in rows}
    axes.set_title(cases.pop() if len(cases) == 1 else rows[0].suite)
    notes = dict.fromkeys(row.note for row in rows if row.note)
    footer = "\n".join([*notes, f"{rows[0].origin.hardware}, {rows[0].origin.commit}"])
    figure.supxlabel(footer, x=1, ha="right", fontsize=6)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _label(row: Row) -> str:
    return row.system + (f" / {row.ratio_to}" if row.ratio_to else "")


def _axis_label(row: Row) -> str:
    return f"{row.metric} ({row.unit}{', simulated' if row.simulated else ''})"


def _draw_bars(axes: Any, rows: Sequence[Row]) -> None:
    several_cases = len({row.case for row in rows}) > 1
    labels = [f"{_label(row)}\n{row.case}" if several_cases else _label(row) for row in rows]
    places = range(len(rows))
    axes.barh(places, [row.value for row in rows], xerr=_interval_lengths(rows), color="#4477aa", capsize=3)
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set_xlabel(_axis_label(rows[0]))
    if rows[0].ratio_to is not None:
        axes.axvline(1.0, color="black", linewidth=0.8)


def _draw_lines(axes: Any, rows: Sequence[Row]) -> None:
    for label in dict.fromkeys(map(_label, rows)):
        line = [row for row in rows if _label(row) == label]
        axes.errorbar(
            [row.x for row in line], [row.value for row in line], yerr=_interval_lengths(line), label=label, marker="o"
        )
    axes.set(xlabel=rows[0].x_name, ylabel=_axis_label(rows[0]), ylim=(0, None))
    if rows[0].ratio_to is not None:
        axes.axhline(1.0, color="black", linewidth=0.8)
    axes.legend()


def _interval_lengths(rows: Sequence[Row]) -> list[list[float]] | None:
    """Below and above each bar's end, as matplotlib wants them; None where no row has an interval.  [2, N]"""
    if all(row.low is None for row in rows):
        return None
    below = [max(0.0, row.value - row.low) if row.low is not None else 0.0 for row in rows]
    above = [max(0.0, row.high - row.value) if row.high is not None else 0.0 for row in rows]
    return [below, above]
