"""`specdec promote POOL`: sessions get a draft pool, share by share, and not where it makes fewer tokens a second.

Returns at once, or with `--on-score` once the pool's scores say enough; `specdec pools` says how it goes. Not here: how
that is decided (the coordinator).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from typing import Any

from specdec.cli.request_flags import BUDGETS, add_endpoint_flag
from specdec.cli.waiting import Waiting
from specdec.client import Client, Promotion, Route
from specdec.errors import InvalidRequest, NotFound

#: Draft tokens that a score is of, at least: the standard error of an alpha is below 0.03 then.
MIN_TESTED = 300

_POLL_S = 0.5


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser("promote", help="give sessions another draft pool, share by share",
                                 allow_abbrev=False)  # fmt: skip
    add_endpoint_flag(parser, environ)
    parser.add_argument("pool", metavar="POOL", help="a pool of draft replicas; takes the place of any other")
    parser.add_argument(
        "--to", type=float, default=1.0, metavar="SHARE",
        help="of the sessions, to which it is to come; default 1; 0: none is promoted any more",
    )  # fmt: skip
    parser.add_argument(
        "--on-score", action="store_true",
        help=f"wait for scores of {MIN_TESTED} draft tokens of a class; begin unless that in use is known better",
    )  # fmt: skip


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Asks, and prints how it stands. Raises SpecdecError where it cannot be."""
    with Client(args.endpoint, budgets=BUDGETS) as client:
        if args.on_score:
            _await_score(client, args.pool)
        promotion = client.promote(args.pool, args.to)
    print("nothing is promoted" if promotion is None else told(promotion))
    return 0


def _await_score(client: Client, name: str) -> None:
    """Returns once the pool's score is as good as those of the pools in use, in every class where both are known.

    Raises:
        NotFound: there is no such pool.
        InvalidRequest: its score is worse, by more than chance explains.
    """
    with Waiting(what="scoring") as waiting:
        while True:
            pools = {pool.name: pool for pool in client.info().pools if pool.role == "draft"}
            if name not in pools:
                raise NotFound(f"{name[:64]} is no draft pool here", reason="POOL_NOT_FOUND", field="pool")
            scores = {route.request_class: route for route in pools[name].routes}
            in_use = [route for pool in pools.values() for route in pool.routes if route.is_chosen]
            pairs = [(scores[route.request_class], route) for route in in_use if route.request_class in scores]
            # A pool that drafts hardly at all, because it does not pay, is never known better than this.
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
    """Whether its alpha is higher by two standard errors. One that hardly drafts has an alpha of a few tokens."""
    scores = [(score.alpha or 0.0, max(1.0, score.num_tested)) for score in (one, other)]
    variance = sum(alpha * (1.0 - alpha) / num_tested for alpha, num_tested in scores)
    return scores[0][0] - scores[1][0] > 2.0 * math.sqrt(variance)


def told(promotion: Promotion) -> str:
    """In one line."""
    state = {"running": "on its way", "done": "there", "rolled_back": "taken back: it made fewer tokens a second"}
    now = f"{promotion.draft_pool}: {promotion.share:.0%} of the sessions"
    return f"{now}, to come to {promotion.most:.0%}, {state.get(promotion.status, promotion.status)}"
