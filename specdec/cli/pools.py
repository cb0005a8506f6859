"""`specdec pools`: what each draft pool does for each class of requests, and which one such requests get.

Not here: replicas and sessions (`status`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.cli.promote import told
from specdec.cli.request_flags import BUDGETS, add_endpoint_flag
from specdec.cli.status import PIPE_COLUMNS
from specdec.client import Client, Pool


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser("pools", help="draft pools of a running system, by class of requests",
                                 allow_abbrev=False)  # fmt: skip
    add_endpoint_flag(parser, environ)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints what the coordinator knows. Raises SpecdecError where it cannot be asked."""
    with Client(args.endpoint, budgets=BUDGETS) as client:
        served = client.info()
    drafts = [pool for pool in served.pools if pool.role == "draft"]
    if args.json:
        promotion = asdict(served.promotion) if served.promotion else None
        print(json.dumps({"pools": [asdict(pool) for pool in drafts], "promotion": promotion}, ensure_ascii=False))
        return 0
    if served.promotion:
        print(told(served.promotion))
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    Console(width=width, no_color=bool(environ.get("NO_COLOR")), highlight=False).print(_table(drafts))
    return 0


def _table(drafts: list[Pool]) -> Table:
    """A row a class of each pool, and one a pool of all its requests; the pool that a class gets is marked."""
    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("pool", "class"):
        table.add_column(name, overflow="fold")
    for name in ("alpha", "tokens/s", "weight", "share", ""):
        table.add_column(name, justify="right")
    for pool in drafts:
        table.add_row(*map(Text, [pool.name, "all", _figure(pool.alpha, 2), "", "", "", ""]))
        for route in pool.routes:
            figures = [_figure(route.alpha, 2), _figure(route.goodput, 0), f"{route.weight:.2f}", f"{route.share:.0%}"]
            table.add_row(*map(Text, ["", route.request_class, *figures, "chosen" if route.is_chosen else ""]))
    return table


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
