"""`specdec promote`: moves sessions to another draft pool, or new sessions to another target model.

`specdec promote POOL` raises the share of a draft pool in steps, and takes it back if it is slower. The command returns
at once, or with `--on-score` once the pool has enough scores. The coordinator raises the share and decides; `specdec
pools` shows the progress. `specdec promote --target FINGERPRINT SHARE` sets the share of a target model at once;
`specdec status` shows the fingerprints and shares.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from specdec.cli import Usage
from specdec.cli.json_output import add_json_flag, print_json
from specdec.cli.pool_tables import model_name
from specdec.cli.progress import Waiting
from specdec.cli.request_flags import add_admin_flag, add_client_flags, connect
from specdec.client import Adapter, Client, Promotion, Route, TargetModel
from specdec.contract.errors import Forbidden, InvalidRequest, NotFound

#: Fewest draft tokens of a score. From there on the standard error of an acceptance rate is below 0.03.
MIN_TESTED = 300

_POLL_S = 0.5

AnswerT = TypeVar("AnswerT")


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser(
        "promote", description="Give sessions another draft pool, share by share, or new sessions another target "
        "model.", allow_abbrev=False,
    )  # fmt: skip
    add_client_flags(parser, environ)
    add_admin_flag(parser)
    parser.add_argument(
        "pool", nargs="?", metavar="POOL", help="pool of draft replicas; it replaces a promotion of another pool"
    )
    parser.add_argument(
        "--target", nargs=2, metavar=("FINGERPRINT", "SHARE"),
        help="instead of a pool: share of the new sessions for a target model, 0 to 1, or `auto` for the share of its "
        "replicas; the first characters of the fingerprint are enough",
    )  # fmt: skip
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
    if (args.pool is None) == (args.target is None):
        raise Usage("promote needs one of POOL and --target FINGERPRINT SHARE")
    if args.target is not None:
        return _run_target(args)
    with connect(args) as client:
        if args.on_score:
            _await_score(client, args.pool)
        promotion = _promote(args, client)
    if args.json:
        print_json({"promotion": asdict(promotion) if promotion else None})
        return 0
    print("nothing is promoted" if promotion is None else describe(promotion))
    return 0


def _run_target(args: argparse.Namespace) -> int:
    """Set the share of a target model and print the shares of all. Raises SpecdecError if it is refused."""
    given, share_text = args.target
    share = _read_share(share_text)
    with connect(args) as client:
        info = client.info()
        known: list[TargetModel | Adapter] = [*info.target_models, *info.adapters]
        fingerprint = _fingerprint_like(given, known)
        if share is None:
            fingerprint, share = "", 0.0
        models = as_operator(args, client, lambda operator: operator.promote_target(fingerprint, share))
        adapters = client.info().adapters if info.adapters else ()
    if args.json:
        print_json({"target_models": list(map(asdict, models)), "adapters": list(map(asdict, adapters))})
        return 0
    for line in (*map(describe_target, models), *map(describe_target, adapters)):
        print(line)
    return 0


def _read_share(text: str) -> float | None:
    """Return the share, or None for `auto`. Raises Usage for another word."""
    if text == "auto":
        return None
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0.0 <= share <= 1.0:
        raise Usage(f"--target: SHARE must be 0 to 1 or auto, got {text[:64]!r}")
    return share


def _fingerprint_like(given: str, known: Sequence[TargetModel | Adapter]) -> str:
    """Return the only fingerprint that begins with `given`. Raises NotFound for none, InvalidRequest for several."""
    found = [model.fingerprint for model in known if model.fingerprint.startswith(given)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{model.fingerprint} ({_name_of(model)})" for model in known) or "none"
    if not found:
        raise NotFound(
            f"no target model has a fingerprint that begins with {given[:64]!r}; there are {listed}",
            reason="MODEL_NOT_FOUND", field="target_fingerprint",
        )  # fmt: skip
    raise InvalidRequest(
        f"{len(found)} target models have a fingerprint that begins with {given[:64]!r}; there are {listed}",
        field="target_fingerprint",
    )


def _promote(args: argparse.Namespace, client: Client) -> Promotion | None:
    return as_operator(args, client, lambda operator: operator.promote(args.pool, args.to))


def as_operator(args: argparse.Namespace, client: Client, call: Callable[[Client], AnswerT]) -> AnswerT:
    """Return the answer of an operator call, made where the coordinator answers such calls.

    Raises SpecdecError if it is refused.
    """
    endpoint = args.admin
    if not endpoint:
        try:
            return call(client)
        except Forbidden:
            endpoint = client.info().admin_address
            if not endpoint:
                raise
    with connect(args, endpoint=endpoint) as operator:
        return call(operator)


def _await_score(client: Client, name: str) -> None:
    """Return once the pool's score is not worse than that of the pool in use, in every class in which both are known.

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


def describe_target(model: TargetModel | Adapter) -> str:
    """Return the replicas and the share of a target model, or of a version of an adapter, in one line."""
    replicas = "1 replica" if model.num_replicas == 1 else f"{model.num_replicas} replicas"
    sessions = "its new sessions" if isinstance(model, Adapter) else "the new sessions"
    return f"{model.fingerprint} {_name_of(model)}: {replicas}, {model.share:.0%} of {sessions}"


def _name_of(model: TargetModel | Adapter) -> str:
    return f"adapter {model.name}" if isinstance(model, Adapter) else model_name(model.model)


def describe(promotion: Promotion) -> str:
    """Return the state of a promotion in one line."""
    state = {"running": "in progress", "done": "reached", "rolled_back": "rolled back: it made fewer tokens a second"}
    now = f"{promotion.draft_pool}: {promotion.share:.0%} of the sessions"
    return f"{now}, to reach {promotion.most:.0%}, {state.get(promotion.status, promotion.status)}"
