"""`specdec scale draft=3 target=2`: changes the numbers of replicas in a running `specdec up` of this user and machine.

Returns once the added replicas serve and the removed ones have drained and ended. If something else runs the replicas
(Kubernetes, Compose), scale them there.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from specdec.cli import Usage, control
from specdec.cli.json_output import add_json_flag, print_json
from specdec.cli.progress import Waiting
from specdec.cli.request_flags import add_endpoint_flag
from specdec.contract.errors import InvalidRequest, Unavailable


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser(
        "scale", description="Start or drain replicas of a running specdec up.", allow_abbrev=False
    )
    add_endpoint_flag(parser, environ)
    parser.add_argument(
        "counts", nargs="+", metavar="ROLE=N",
        help="target=N or draft=N; with several draft models draft-POOL=N. Other roles keep their numbers",
    )  # fmt: skip
    add_json_flag(parser, "a line")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Request the numbers, show what is waited for, and print the numbers that were reached.

    Raises:
        Usage: the arguments are not ROLE=N.
        SpecdecError: as `request_of_system`.
    """
    answer = request_of_system(args.endpoint, _counts(args.counts), what="scaling")
    if args.json:
        print_json({"counts": answer["counts"]})
        return 0
    print(" ".join(f"{role}={number}" for role, number in answer["counts"].items()))
    return 0


def request_of_system(endpoint: str, request: Mapping[str, Any], *, what: str) -> Mapping[str, Any]:
    """Send a request to the `specdec up` of an endpoint, show what it waits for, and return its last answer.

    Raises:
        InvalidRequest: the endpoint is not on this machine, or the request is refused.
        Unavailable: no `specdec up` of this user answers there, or it ended before the request did.
        SpecdecError: the request failed.
    """
    port = control.local_port(endpoint)
    if port is None:
        raise InvalidRequest(
            f"{endpoint} is not on this machine: specdec scale and join run where specdec up does", field="endpoint"
        )
    answer: Mapping[str, Any] = {}
    with Waiting(what=what) as waiting:
        for answer in control.ask(port, request):
            if answer.get("stage"):
                waiting.show(answer["stage"])
    if "counts" not in answer:
        raise Unavailable("specdec up has ended", reason="DRAINING")
    return answer


def _counts(words: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        found = re.fullmatch(r"(target|draft(?:-[\w.-]+)?)=(-?\d{1,9})", word)
        if found is None or found[1] in counts:
            raise Usage(f"{word!r} is not target=N, draft=N or draft-POOL=N, each at most once")
        counts[found[1]] = int(found[2])
    return counts
