"""`specdec scale draft=3 target=2`: another number of replicas in a running `specdec up` of this user and machine.

Returns once they serve, and those that are too many have drained and gone. Not here: how that is done (`fleet`), how
`up` is told (`control`). Where replicas are run by something else (Kubernetes, Compose), that scales them.
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
from collections.abc import Mapping
from typing import Any

from specdec.cli import control
from specdec.cli.request_flags import add_endpoint_flag
from specdec.cli.up_flags import Usage
from specdec.cli.waiting import Waiting
from specdec.errors import InvalidRequest
from specdec.settings.addresses import split_address


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser("scale", help="start or drain replicas of a running specdec up", allow_abbrev=False)
    add_endpoint_flag(parser, environ)
    parser.add_argument(
        "counts",
        nargs="+",
        metavar="ROLE=N",
        help="target=N or draft=N, of several draft models draft-POOL=N; the others stay as they are",
    )


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Asks, shows what is waited for, prints the numbers that were reached.

    Raises:
        Usage: the arguments are not ROLE=N.
        InvalidRequest: the endpoint is not on this machine.
        Unavailable: no `specdec up` can be told there.
    """
    answer = told(args.endpoint, _counts(args.counts), what="scaling")
    if "error" in answer:
        print(f"error: {answer['error']}", file=sys.stderr)
        return 1
    print(" ".join(f"{role}={number}" for role, number in answer["counts"].items()))
    return 0


def told(endpoint: str, request: Mapping[str, Any], *, what: str) -> Mapping[str, Any]:
    """Asks the `specdec up` of an endpoint and shows what it waits for; its last answer.

    Raises: as `run`, but for Usage.
    """
    with Waiting(what=what) as waiting:
        answer: Mapping[str, Any] = {}
        for answer in control.ask(_local_port(endpoint), request):
            if answer.get("stage"):
                waiting.show(answer["stage"])
    return answer


def _counts(words: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        found = re.fullmatch(r"(target|draft(?:-[\w.-]+)?)=(-?\d{1,9})", word)
        if found is None or found[1] in counts:
            raise Usage(f"{word!r} is not target=N, draft=N or draft-POOL=N, each at most once")
        counts[found[1]] = int(found[2])
    return counts


def _local_port(endpoint: str) -> int:
    """The port of an endpoint. Raises InvalidRequest for one on another machine, where another system may run."""
    try:
        host, port = split_address(endpoint)
        resolved = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = resolved[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)  # only an address of this machine's can be bound
    except (OSError, ValueError):
        raise InvalidRequest(
            f"{endpoint} is not on this machine: scale runs where specdec up does", field="endpoint"
        ) from None
    return port
