"""Show a progress bar while a suite runs, and a table afterwards.

Called by `__main__` and, for progress, by the suites.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

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

from bench.harness.rows import Row

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


def print_suites(suites: Iterable[tuple[str, str, int]]) -> None:
    """Print one line a suite: its name, about how many minutes it takes, and the first line of its docstring."""
    for name, docstring, minutes in suites:
        shown = docstring.partition("\n")[0].partition(": ")[2]
        print(f"{name:<14} {minutes:>3} min  {shown}")
