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
from specdec.cli.request_flags import BUDGETS, add_endpoint_flag
from specdec.cli.scale import request_of_system
from specdec.client import Client
from specdec.errors import InvalidRequest, VocabularyMismatch


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser(
        "join", description="Add a draft model to a running specdec up. It is scored before requests use it.",
        allow_abbrev=False,
    )  # fmt: skip
    add_endpoint_flag(parser, environ)
    parser.add_argument("draft", metavar="POOL=PATH_OR_HUB_ID", help="name of its pool, and the model")


def run(args: argparse.Namespace) -> int:
    """Read POOL=MODEL and join. Raises Usage, and as `join`."""
    pool, _, model = args.draft.partition("=")
    if not pool or not model:
        raise Usage(f"{args.draft!r} is not POOL=PATH_OR_HUB_ID")
    return join(args.endpoint, pool, model)


def join(endpoint: str, pool: str, model: str) -> int:
    """Add the model, show what is waited for, print one line, and return the exit code.

    Raises:
        InvalidRequest: the model does not exist, the pool exists already, or the endpoint is on another machine.
        Unsupported: the model cannot be served.
        VocabularyMismatch: the model has other tokens than the target.
        Unavailable: no `specdec up` of this user answers there.
    """
    require_servable(model, flag="draft")
    with Client(endpoint, budgets=BUDGETS) as client:
        served = client.info()
    fingerprint = vocabulary_fingerprint(load_vocabulary(model))
    if fingerprint != served.vocabulary_fingerprint:
        raise VocabularyMismatch(
            f"{model} has vocabulary fingerprint {fingerprint}, the target's is {served.vocabulary_fingerprint}"
        )
    if pool in [each.name for each in served.pools if each.role == "draft"]:
        raise InvalidRequest(f"there is already a draft pool called {pool[:64]}", field="pool")
    path = str(Path(model).resolve()) if Path(model).exists() else model
    request_of_system(endpoint, {"join": {"pool": pool, "model": path}}, what="joining")
    print(f"{pool} joined as a shadow; specdec promote {pool} --on-score gives it requests once its score is as good")
    return 0
