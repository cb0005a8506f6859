"""`specdec promote POOL`: moves sessions to another draft pool, share by share, and back if it is slower.

The command returns at once, or with `--on-score` once the pool has enough scores. The coordinator raises the share and
decides; `specdec pools` shows the progress.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from specdec.cli.json_output import add_json_flag, print_json
from specdec.cli.request_flags import add_client_flags, address, connect
from specdec.cli.waiting import Waiting
from specdec.client import Client, Promotion, Route
from specdec.errors import Forbidden, InvalidRequest, NotFound

#: Fewest draft tokens of a score. From there on the standard error of an acceptance rate is below 0.03.
MIN_TESTED = 300

_POLL_S = 0.5


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser("promote", description="Give sessions another draft pool, share by share.",
                                 allow_abbrev=False)  # fmt: skip
    add_client_flags(parser, environ)
    parser.add_argument(
        "--admin", type=address, metavar="HOST:PORT",
        help="address of the coordinator for operator calls; default: the one that it names at --endpoint",
    )  # fmt: skip
    parser.add_argument("pool", metavar="POOL", help="pool of draft replicas; it replaces a promotion of another pool")
    parser.add_argument(
        "--to", type=float, default=1.0, metavar="SHARE",
        help="share of the sessions to reach; default 1; 0 ends the promotion",
    )  # fmt: skip
    parser.add_argument(
        "--on-score", action="store_true",
        help=f"wait for scores of {MIN_TESTED} draft tokens of a class; begin unless the pool in use is better",
    )  # fmt: skip
    add_json_flag(parser, "a line")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Request the promotion and print its state. Raises SpecdecError if it is refused."""
    with connect(args) as client:
        if args.on_score:
            _await_score(client, args.pool)
        promotion = _promote(args, client)
    if args.json:
        print_json({"promotion": asdict(promotion) if promotion else None})
        return 0
    print("nothing is promoted" if promotion is None else describe(promotion))
    return 0


def _promote(args: argparse.Namespace, client: Client) -> Promotion | None:
    """Request the promotion where the coordinator answers operator calls. Raises SpecdecError if it is refused."""
    endpoint = args.admin
    if not endpoint:
        try:
            return client.promote(args.pool, args.to)
        except Forbidden:
            endpoint = client.info().admin_address
            if not endpoint:
                raise
    with connect(args, endpoint=endpoint) as operator:
        return operator.promote(args.pool, args.to)


def _await_score(client: Client, name: str) -> None:
    """Return once the pool's score is not worse than that of the pool in use, in every class where both are known.

    Raises:
        NotFound: the pool does not exist.
        InvalidRequest: its score is worse, by more than chance explains.
    """
    with Waiting(what="scoring") as waiting:
        while True:
            pools = {pool.name: pool for pool in client.info().pools if pool.role == "draft"}
            if name not in pools:
                raise NotFound(
                    f"this system has no draft pool called {name[:64]}", reason="POOL_NOT_FOUND", field="pool"
                )
            scores = {route.request_class: route for route in pools[name].routes}
            in_use = [route for pool in pools.values() for route in pool.routes if route.is_chosen]
            pairs = [(scores[route.request_class], route) for route in in_use if route.request_class in scores]
            # A pool in use that rarely drafts, because drafting does not pay, never gets a more certain score.
            known = [
                (own, theirs) for own, theirs in pairs if own.num_tested >= MIN_TESTED and theirs.alpha is not None
            ]
            for own, theirs in known:
                if _is_known_better(theirs, own):
                    words = (
                        f"its score for {own.request_class} is {own.alpha:.3f}, the pool in use has {theirs.alpha:.3f}"
                    )
                    raise InvalidRequest(f"{name}: {words}", field="pool")
            if known:
                return
            most = max((route.num_tested for route in scores.values()), default=0.0)
            waiting.show(f"{most:.0f} of {MIN_TESTED} draft tokens")
            time.sleep(_POLL_S)


def _is_known_better(one: Route, other: Route) -> bool:
    """Return whether the first acceptance rate is higher by two standard errors of their difference."""
    scores = [(score.alpha or 0.0, max(1.0, score.num_tested)) for score in (one, other)]
    variance = sum(alpha * (1.0 - alpha) / num_tested for alpha, num_tested in scores)
    return scores[0][0] - scores[1][0] > 2.0 * math.sqrt(variance)


def describe(promotion: Promotion) -> str:
    """Return the state of a promotion in one line."""
    state = {"running": "in progress", "done": "reached", "rolled_back": "rolled back: it made fewer tokens a second"}
    now = f"{promotion.draft_pool}: {promotion.share:.0%} of the sessions"
    return f"{now}, to reach {promotion.most:.0%}, {state.get(promotion.status, promotion.status)}"
