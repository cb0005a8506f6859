"""`specdec join POOL=MODEL`: a further draft model in a running `specdec up` of this user and machine, as a shadow.

It is scored on what the others draft, and requests get it if they name it, or by `specdec promote`. Not here: how it is
started (`fleet`, `launching`), how `up` is told (`control`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.checkpoints.preflight import require_servable
from specdec.checkpoints.vocabulary import load_vocabulary, vocabulary_fingerprint
from specdec.cli import scale
from specdec.cli.request_flags import BUDGETS, add_endpoint_flag
from specdec.cli.up_flags import Usage
from specdec.client import Client
from specdec.errors import InvalidRequest, VocabularyMismatch


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser("join", help="add a draft model to a running specdec up, scored before it is used",
                                 allow_abbrev=False)  # fmt: skip
    add_endpoint_flag(parser, environ)
    parser.add_argument("draft", metavar="POOL=PATH_OR_HUB_ID", help="its pool's name, and the model")


def run(args: argparse.Namespace) -> int:
    """Has it join, shows what is waited for. Raises Usage, and as `join`."""
    pool, _, model = args.draft.partition("=")
    if not pool or not model:
        raise Usage(f"{args.draft!r} is not POOL=PATH_OR_HUB_ID")
    return join(args.endpoint, pool, model)


def join(endpoint: str, pool: str, model: str) -> int:
    """Returns the exit code; prints one line.

    Raises:
        InvalidRequest: no such model, or the pool is there already; or the endpoint is not on this machine.
        Unsupported: the model cannot be served.
        VocabularyMismatch: it has other tokens than the target.
        Unavailable: no `specdec up` can be told there.
    """
    require_servable(model, flag="draft")
    with Client(endpoint, budgets=BUDGETS) as client:
        served = client.info()
    own = vocabulary_fingerprint(load_vocabulary(model))
    if own != served.vocabulary_fingerprint:
        raise VocabularyMismatch(f"{model} has vocabulary fingerprint {own}, the target's is "
                                 f"{served.vocabulary_fingerprint}")  # fmt: skip
    if pool in [each.name for each in served.pools if each.role == "draft"]:
        raise InvalidRequest(f"there is a draft pool called {pool[:64]} already", field="pool")
    path = str(Path(model).resolve()) if Path(model).exists() else model
    answer = scale.told(endpoint, {"join": {"pool": pool, "model": path}}, what="joining")
    if "error" in answer:
        print(f"error: {answer['error']}", file=sys.stderr)
        return 1
    print(f"{pool} joined as a shadow; specdec promote {pool} --on-score gives it requests once its score is as good")
    return 0
