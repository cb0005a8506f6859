"""Maps a failed gRPC call of a client to one error of the tree. Both clients use it."""

from __future__ import annotations

import re

import grpc

from specdec.errors import ClientClosed, SpecdecError, Unavailable
from specdec.rpc.status import DETAILS_KEY, from_rpc_error

# Parts of gRPC's messages. The last ones depend on the resolver and concern names without an address.
_NOT_CONNECTED = re.compile(
    "failed to connect to all addresses|connections to all backends failing|resolution|resolving|lookup failed"
)


def read_failure(error: grpc.RpcError, endpoint: str) -> SpecdecError:
    """Return the error of the tree for a failed call to the coordinator at `endpoint`."""
    failure = from_rpc_error(error, peer=endpoint)
    if not isinstance(failure, Unavailable) or not isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        return failure
    details = error.details() or ""
    if is_from_coordinator(error) or not _NOT_CONNECTED.search(details):
        return failure
    message = f"no coordinator at {endpoint}; start one with `specdec up` ({details})"
    return Unavailable(message, reason="COORDINATOR_UNAVAILABLE")


def is_without_target(error: BaseException | None) -> bool:
    """Return whether a coordinator reported that it has no target replica.

    Errors that gRPC made have the same class and reason, so the gRPC error is read that `error` was raised from. An
    error that a client raised keeps it as its context, which tracebacks do not show.
    """
    if not isinstance(error, Unavailable) or error.reason != Unavailable.default_reason:
        return False
    rpc_error = error.__cause__ or error.__context__
    return isinstance(rpc_error, grpc.RpcError) and is_from_coordinator(rpc_error)


def is_from_coordinator(error: grpc.RpcError) -> bool:
    """Return whether the coordinator made the error, and not gRPC on the way to it."""
    return isinstance(error, grpc.aio.AioRpcError | grpc.Call) and DETAILS_KEY in dict(error.trailing_metadata() or ())


def closed() -> ClientClosed:
    """Return the error of a call on a closed client."""
    return ClientClosed("the client is closed; make a new one")
