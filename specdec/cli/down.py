"""`specdec down`: ends the `specdec up` of this user that serves an endpoint on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from specdec.cli import control
from specdec.cli.json_output import add_json_flag, print_json
from specdec.cli.progress import Waiting
from specdec.cli.request_flags import add_endpoint_flag
from specdec.contract.errors import InvalidRequest


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser(
        "down", description="End a specdec up of yours on this machine, and return once all its processes have ended.",
        allow_abbrev=False,
    )  # fmt: skip
    add_endpoint_flag(parser, environ)
    add_json_flag(parser, "a line")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Ask the system to stop, wait until its process has ended, and print a line.

    Raises:
        InvalidRequest: the endpoint is not on this machine.
        Unavailable: no `specdec up` of this user answers there.
    """
    port = control.local_port(args.endpoint)
    if port is None:
        raise InvalidRequest(
            f"{args.endpoint} is not on this machine: specdec down runs where specdec up does", field="endpoint"
        )
    with Waiting(what="stopping") as waiting:
        for answer in control.ask(port, {"stop": {}}):
            waiting.show(f"the system at {args.endpoint}: {answer['stage']}")
    if args.json:
        print_json({"stopped": args.endpoint})
    else:
        print(f"stopped {args.endpoint}")
    return 0
