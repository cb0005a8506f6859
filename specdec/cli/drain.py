"""`specdec drain REPLICA`: takes one replica, or a coordinator, out of use, and waits until nothing runs there.

The replica accepts no new sessions, and the turns that run end there. Its process goes on: end it afterwards, or let it
accept sessions again with `--undo`. The command ends with exit code 1 if streams are left after `--timeout`; the
replica stays out of use then, and the same command waits again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from specdec.cli.json_output import add_json_flag, print_json
from specdec.cli.progress import Waiting
from specdec.cli.promote import as_operator
from specdec.cli.request_flags import add_admin_flag, add_client_flags, connect
from specdec.client import Client, Drained
from specdec.contract.errors import DeadlineExceeded

_POLL_S = 0.5
#: Time until every coordinator has learned that a replica drains. Until then it may still send a new session there.
_KNOWN_AFTER_S = 2.5

#: Consequences of a drain of the last one, by role.
_LAST = {
    "draft": "new sessions run without drafts of it",
    "target": "new turns still run there until another one serves its model",
    "coordinator": "new requests are refused",
}


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser(
        "drain", description="Let one replica take no new sessions, and wait until no stream runs there.",
        allow_abbrev=False,
    )  # fmt: skip
    add_client_flags(parser, environ)
    add_admin_flag(parser)
    parser.add_argument(
        "replica", metavar="REPLICA",
        help="id or HOST:PORT of a draft or target replica (see specdec status), or of the coordinator at --endpoint",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=_seconds, default=300.0, metavar="S",
        help="seconds to wait for running streams; default 300; 0 asks once, and shows what is left",
    )  # fmt: skip
    parser.add_argument("--undo", action="store_true", help="let it accept new sessions again")
    add_json_flag(parser, "a line")


def _seconds(text: str) -> float:
    """Return an argument that is a number of seconds. Raises ArgumentTypeError for anything else."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds from 0 on, got {text!r}")
    return seconds


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Drain a replica, wait, and print what is left.

    Raises:
        NotFound: no replica has that name.
        DeadlineExceeded: streams are left after `--timeout`.
        SpecdecError: the call is refused, or the coordinator or the replica does not answer.
    """
    with connect(args) as client:
        left = _ask(args, client)
        if left.is_last and not args.undo:
            print(f"warning: {_named(left)} is the last one of its kind: {_LAST[left.role]}", file=sys.stderr)
        if not args.undo and args.timeout:
            left = _await_end(args, client, left)
    if args.json:
        print_json({**asdict(left), "draining": not args.undo})
    elif args.undo:
        print(f"{_named(left)} takes new sessions again")
    else:
        print(f"{_named(left)} takes no new sessions: {_counts(left)}")
    return 0


def _await_end(args: argparse.Namespace, client: Client, left: Drained) -> Drained:
    """Return what is left once no stream is, and no coordinator sends new ones. Raises DeadlineExceeded."""
    began_s = free_since_s = time.monotonic()
    with Waiting(what="draining") as waiting:
        while True:
            now_s = time.monotonic()
            free_since_s = now_s if left.num_streams else free_since_s
            if not left.num_streams and now_s - free_since_s >= _KNOWN_AFTER_S:
                return left
            if now_s - began_s >= args.timeout and left.num_streams:
                raise DeadlineExceeded(
                    f"{_named(left)} still has {_counts(left)} after {args.timeout:g} s; it takes no new sessions. "
                    "Run the command again to wait longer, or end the process: other replicas resume its streams"
                )
            waiting.show(f"{_named(left)}: {_counts(left)}")
            time.sleep(_POLL_S)
            left = _ask(args, client)


def _ask(args: argparse.Namespace, client: Client) -> Drained:
    return as_operator(args, client, lambda operator: operator.drain(args.replica, undo=args.undo))


def _named(left: Drained) -> str:
    return f"{left.role} {left.replica_id}"


def _counts(left: Drained) -> str:
    streams = "1 stream left" if left.num_streams == 1 else f"{left.num_streams or 'no'} streams left"
    if left.role == "coordinator":
        return streams
    sessions = "1 session" if left.num_sessions == 1 else f"{left.num_sessions} sessions"
    return f"{streams}, KV of {sessions}"
