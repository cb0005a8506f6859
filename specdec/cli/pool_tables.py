"""Cells and widths of the tables of `specdec status`, `specdec pools` and `specdec top`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.client import Adapter, Pool, Route

#: Width of a table in a pipe, where no line is cut or folded.
_PIPE_COLUMNS = 4096


def console_for(environ: Mapping[str, str]) -> Console:
    """Return a console for stdout, as wide as the terminal. `environ` has the process's NO_COLOR."""
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    return Console(width=width, no_color=bool(environ.get("NO_COLOR")), highlight=False)


def print_table(columns: Mapping[str, str], rows: Sequence[Sequence[str]], environ: Mapping[str, str]) -> None:
    """Print a table that fits the terminal; arguments as of `table_of` and `console_for`."""
    console_for(environ).print(table_of(columns, rows))


def table_of(columns: Mapping[str, str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table.

    Args:
        columns: "left" or "right" alignment by header.
        rows: cells; markup in them is shown as it is.
    """
    table = Table(box=None, pad_edge=False, header_style="")
    for header, justify in columns.items():
        table.add_column(header, justify="right" if justify == "right" else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def model_name(model: str) -> str:
    """Return the last part of a model's path or hub id."""
    return PurePath(model).name or model


def pool_acceptance(pool: Pool) -> str:
    """Return the accepted share of a draft pool over all requests, and how it is known."""
    # Without routing only drafts that were tested count.
    is_measured = not pool.routes or any(route.share > 0.0 for route in pool.routes)
    return _acceptance(pool.alpha, is_measured=is_measured)


def route_acceptance(route: Route) -> str:
    """Return the accepted share of a draft pool for one class of requests, and how it is known."""
    return _acceptance(route.alpha, is_measured=route.share > 0.0)


def adapter_acceptance(adapter: Adapter) -> str:
    """Return the accepted share of the draft pool that drafts for an adapter most."""
    return _acceptance(adapter.alpha, is_measured=True)


def _acceptance(alpha: float | None, *, is_measured: bool) -> str:
    if alpha is None:
        return "not known yet"
    return f"{alpha:.0%} {'measured' if is_measured else 'predicted'}"
