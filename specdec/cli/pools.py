"""`specdec pools`: prints the statistics of each draft pool by class of requests, and which pool a class gets."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from specdec.cli.json_output import add_json_flag, print_json
from specdec.cli.pool_tables import pool_acceptance, print_table, route_acceptance
from specdec.cli.promote import describe
from specdec.cli.request_flags import add_client_flags, connect
from specdec.client import Pool

_COLUMNS = {
    **dict.fromkeys(("pool", "requests", "accepted"), "left"),
    **dict.fromkeys(("predicted tokens/s", "weight", "share"), "right"),
    "": "left",
}


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser("pools", help="draft pools of a running system, by class of requests",
                                 allow_abbrev=False)  # fmt: skip
    add_client_flags(parser, environ)
    add_json_flag(parser, "a table")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the pools. Raises SpecdecError if the coordinator cannot be reached."""
    with connect(args) as client:
        info = client.info()
    drafts = [pool for pool in info.pools if pool.role == "draft"]
    if args.json:
        promotion = asdict(info.promotion) if info.promotion else None
        print_json({"pools": [asdict(pool) for pool in drafts], "promotion": promotion})
        return 0
    if info.promotion:
        print(describe(info.promotion))
    print_table(_COLUMNS, [row for pool in drafts for row in _rows(pool)], environ)
    return 0


def _rows(pool: Pool) -> Iterator[list[str]]:
    """Yield a row for all requests of a pool, then one for each class of requests."""
    yield [pool.name, "all", pool_acceptance(pool), "", "", "", "shadow" if pool.shadow else ""]
    for route in pool.routes:
        goodput = "-" if route.goodput is None else f"{route.goodput:.0f}"
        chosen = "chosen" if route.is_chosen else ""
        yield [
            "",
            route.request_class,
            route_acceptance(route),
            goodput,
            f"{route.weight:.2f}",
            f"{route.share:.0%}",
            chosen,
        ]
