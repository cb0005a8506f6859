"""What a person sees: a progress bar while a suite runs, a table and plots when it has run.

Not here: what is measured. Called by `__main__` and, for progress, by the suites.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bench.rows import Row


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr for the length of the block; yields the function that advances it by one."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print one line a row, and under them where and when they were measured."""
    console = console or Console(width=None if sys.stdout.isatty() else 180)
    table = Table(title=f"bench {rows[0].suite}" + (" (quick: too few pairs to keep)" if rows[0].quick else ""))
    for heading in ("row", "case", "system", "metric"):
        table.add_column(heading)
    for heading in ("value", "unit", "95 % interval", "against", "required"):
        table.add_column(heading, justify="right")
    for row in rows:
        style = "red" if row.falls_short else ("bold" if row.row is not None else None)
        metric = f"{row.metric} (simulated)" if row.simulated else row.metric
        number = "" if row.row is None else str(row.row)
        interval = "" if row.low is None or row.high is None else f"{row.low:.3g} to {row.high:.3g} ({row.num_pairs})"
        required = _required(row) + (" SHORT" if row.falls_short else "")
        cells = (number, row.case, row.system, metric, f"{row.value:.4g}", row.unit, interval)
        table.add_row(*cells, row.ratio_to or "", required, style=style)
    console.print(table)
    origin = rows[0].origin
    console.print(f"{origin.hardware} · commit {origin.commit} · {origin.date}")


def _required(row: Row) -> str:
    if row.at_most is not None:
        return f"<= {row.at_most:g}"
    return "" if row.required is None else f">= {row.required:g}"


def write_plots(rows: Sequence[Row], directory: Path) -> list[Path]:
    """One PNG per metric that several systems share, or that is a ratio: a bar per system and case.

    Returns:
        The files written. Needs the `bench` extra (matplotlib).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for metric in dict.fromkeys(row.metric for row in rows):
        shown = [row for row in rows if row.metric == metric]
        if len(shown) < 2 and shown[0].ratio_to is None:
            continue
        labels = [row.system + (f" / {row.ratio_to}" if row.ratio_to else "") for row in shown]
        figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.5 * len(shown)), layout="constrained")
        axes.barh(labels, [row.value for row in shown], xerr=_interval_lengths(shown), color="#4477aa", capsize=3)
        axes.invert_yaxis()
        simulated = ", simulated" if shown[0].simulated else ""
        axes.set(xlabel=f"{metric} ({shown[0].unit}{simulated})", title=shown[0].case)
        if shown[0].ratio_to is not None:
            axes.axvline(1.0, color="black", linewidth=0.8)
        figure.text(1, 0, f"{shown[0].origin.hardware}, {shown[0].origin.commit}", ha="right", va="bottom", fontsize=6)
        path = directory / f"{shown[0].suite}_{metric}.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        written.append(path)
    return written


def _interval_lengths(rows: Sequence[Row]) -> list[list[float]] | None:
    """Below and above each bar's end, as matplotlib wants them; None where no row has an interval.  [2, N]"""
    if all(row.low is None for row in rows):
        return None
    below = [max(0.0, row.value - row.low) if row.low is not None else 0.0 for row in rows]
    above = [max(0.0, row.high - row.value) if row.high is not None else 0.0 for row in rows]
    return [below, above]
