"""`specdec health HOST:PORT`: exits with code 0 if the service there is SERVING, for health checks of containers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.cli.json_output import add_json_flag, print_json
from specdec.cli.request_flags import add_tls_flags, address, tls_of_flags
from specdec.client import Tls
from specdec.contract.errors import SpecdecError, Unavailable
from specdec.rpc.channels import dial_blocking
from specdec.rpc.credentials import describe_refused_connection
from specdec.rpc.status_mapping import from_rpc_error

_TIMEOUT_S = 5.0


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser("health", description="Ask a service for its health.", allow_abbrev=False)
    parser.add_argument("address", metavar="HOST:PORT", type=address)
    add_tls_flags(parser, environ)
    add_json_flag(parser, "a word")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    tls = tls_of_flags(args)
    with dial_blocking(args.address, tls=tls) as channel:
        status = check(channel, tls=tls)
    if args.json:
        print_json({"status": status})
    else:
        print(status)
    return 0 if status == "SERVING" else 1


def check(channel: grpc.Channel, *, timeout_s: float = _TIMEOUT_S, tls: Tls | None = None) -> str:
    """Return the whole server's status from `grpc.health.v1`: SERVING, NOT_SERVING, ...

    Args:
        channel: the connection, made with `tls`.
        timeout_s: limit on the wait.
        tls: credentials of the channel; None: plaintext.

    Raises:
        SpecdecError: the server cannot be reached.
    """
    try:
        response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        if refused := describe_refused_connection(error.details() or "", tls):
            raise Unavailable(f"no connection to the service: {refused}") from error
        raise from_rpc_error(error) from error
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def is_serving(channel: grpc.Channel) -> bool:
    """Return whether the server answers SERVING; False while it cannot be reached."""
    try:
        return check(channel, timeout_s=1.0) == "SERVING"
    except SpecdecError:
        return False
