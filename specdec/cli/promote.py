"""`specdec promote POOL`: sessions get a draft pool, share by share, and not where it makes fewer tokens a second.

Returns at once; `specdec pools` says how it goes. Not here: how that is decided (the coordinator).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from specdec.cli.request_flags import BUDGETS, add_endpoint_flag
from specdec.client import Client, Promotion


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser("promote", help="give sessions another draft pool, share by share",
                                 allow_abbrev=False)  # fmt: skip
    add_endpoint_flag(parser, environ)
    parser.add_argument("pool", metavar="POOL", help="a pool of draft replicas; takes the place of any other")
    parser.add_argument(
        "--to", type=float, default=1.0, metavar="SHARE",
        help="of the sessions, to which it is to come; default 1; 0: none is promoted any more",
    )  # fmt: skip


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Asks, and prints how it stands. Raises SpecdecError where it cannot be."""
    with Client(args.endpoint, budgets=BUDGETS) as client:
        promotion = client.promote(args.pool, args.to)
    print("nothing is promoted" if promotion is None else told(promotion))
    return 0


def told(promotion: Promotion) -> str:
    """In one line."""
    state = {"running": "on its way", "done": "there", "rolled_back": "taken back: it made fewer tokens a second"}
    now = f"{promotion.draft_pool}: {promotion.share:.0%} of the sessions"
    return f"{now}, to come to {promotion.most:.0%}, {state.get(promotion.status, promotion.status)}"
