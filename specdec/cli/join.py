"""`specdec join POOL=MODEL`: adds a draft model to a running `specdec up` of this user and machine, as a shadow.

The model is scored on what the other drafts propose. Requests use it if they name its pool, or after `specdec promote`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.checkpoints.preflight import require_servable
from specdec.checkpoints.vocabulary import load_vocabulary, vocabulary_fingerprint
from specdec.cli import Usage
from specdec.cli.json_output import add_json_flag, print_json
from specdec.cli.request_flags import add_client_flags, connect
from specdec.cli.scale import request_of_system
from specdec.contract.errors import InvalidRequest, VocabularyMismatch


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser(
        "join", description="Add a draft model to a running specdec up. It is scored before requests use it.",
        allow_abbrev=False,
    )  # fmt: skip
    add_client_flags(parser, environ)
    parser.add_argument("draft", metavar="POOL=PATH_OR_HUB_ID", help="name of its pool, and the model")
    add_json_flag(parser, "a line")


def run(args: argparse.Namespace) -> int:
    """Read POOL=MODEL and join. Raises Usage, and as `join`."""
    pool, _, model = args.draft.partition("=")
    if not pool or not model:
        raise Usage(f"{args.draft!r} is not POOL=PATH_OR_HUB_ID")
    join(args, pool, model)
    if args.json:
        print_json({"pool": pool, "model": model, "shadow": True})
    return 0


def join(args: argparse.Namespace, pool: str, model: str) -> None:
    """Add the model to the system of the flags, show what is waited for, and say so unless the output is JSON.

    Raises:
        InvalidRequest: the model does not exist, the pool exists already, or the endpoint is on another machine.
        Unsupported: the model cannot be served.
        VocabularyMismatch: the model has other tokens than the target.
        Unavailable: no `specdec up` of this user answers there.
    """
    require_servable(model, flag="draft")
    with connect(args) as client:
        served = client.info()
    fingerprint = vocabulary_fingerprint(load_vocabulary(model))
    if fingerprint != served.vocabulary_fingerprint:
        raise VocabularyMismatch(
            f"{model} has vocabulary fingerprint {fingerprint}, the target's is {served.vocabulary_fingerprint}"
        )
    if pool in [each.name for each in served.pools if each.role == "draft"]:
        raise InvalidRequest(f"there is already a draft pool called {pool[:64]}", field="pool")
    path = str(Path(model).resolve()) if Path(model).exists() else model
    request_of_system(args.endpoint, {"join": {"pool": pool, "model": path}}, what="joining")
    if not args.json:
        later = f"specdec promote {pool} --on-score gives it requests once its score is as good"
        print(f"{pool} joined as a shadow; {later}")
