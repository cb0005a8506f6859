"""`specdec status`: what a running system serves, with which replicas, and how its drafts do.

Not here: whether a single service is well (`health`).
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

from specdec.cli.request_flags import BUDGETS, add_endpoint_flag
from specdec.client import Client, Pool, ServerInfo

#: Columns of a table that is read by another program, which cuts nothing off.
PIPE_COLUMNS = 4096


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser("status", help="pools, replicas and sessions of a running system", allow_abbrev=False)
    add_endpoint_flag(parser, environ)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints what the coordinator knows. Raises SpecdecError where it cannot be asked."""
    with Client(args.endpoint, budgets=BUDGETS) as client:
        served = client.info()
    if args.json:
        print(json.dumps(asdict(served), ensure_ascii=False))
        return 0
    print(
        f"specdec {served.version}  {served.target_model}  context {served.max_context_tokens} tokens  "
        f"gamma at most {served.max_gamma}"
    )
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    Console(width=width, no_color=bool(environ.get("NO_COLOR")), highlight=False).print(_table(served))
    if not any(pool.role == "target" and pool.replicas for pool in served.pools):
        print("no target replica is alive: requests wait, or fail", file=sys.stderr)
    return 0


def _table(served: ServerInfo) -> Table:
    """A row a replica; what is a pool's stands in its first row."""
    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("role", "pool", "model", "gamma", "alpha", "replica", "address"):
        table.add_column(name, overflow="fold")
    for name in ("sessions", "kv"):
        table.add_column(name, justify="right")
    for pool in served.pools:
        of_pool = [pool.role, pool.name, pool.model, _figure(pool, pool.gamma, 1), _figure(pool, pool.alpha, 2)]
        if not pool.replicas:  # drafts that the coordinator finds by itself
            table.add_row(*map(Text, of_pool))
        for replica in pool.replicas:
            name = f"{replica.replica_id} (draining)" if replica.draining else replica.replica_id
            figures = [str(replica.num_sessions), f"{replica.kv_usage:.0%}"]
            table.add_row(*map(Text, [*of_pool, name, replica.address, *figures]))  # a model's path is no markup
            of_pool = [""] * len(of_pool)
    return table


def _figure(pool: Pool, value: float | None, digits: int) -> str:
    """Of a draft pool; "-" before there is one."""
    if pool.role != "draft":
        return ""
    return "-" if value is None else f"{value:.{digits}f}"
