"""What a failed gRPC call of the client means: one error of the tree, whoever made it.

Not here: whether the call is tried again (`recovery`). Called by both clients.
"""

from __future__ import annotations

import re

import grpc

from specdec.errors import ClientClosed, SpecdecError, Unavailable
from specdec.rpc.status import DETAILS_KEY, from_rpc_error

# In gRPC's words; the last ones, which differ by resolver, are of names that no address belongs to.
_NOT_CONNECTED = re.compile(
    "failed to connect to all addresses|connections to all backends failing|resolution|resolving|lookup failed"
)


def read_failure(error: grpc.RpcError, endpoint: str) -> SpecdecError:
    """The error that a call to the coordinator at `endpoint` ended with."""
    ours = from_rpc_error(error, peer=endpoint)
    if not isinstance(ours, Unavailable) or not isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        return ours
    details = error.details() or ""
    if is_coordinators_word(error) or not _NOT_CONNECTED.search(details):
        return ours
    message = f"no coordinator at {endpoint}; start one with `specdec up` ({details})"
    return Unavailable(message, reason="COORDINATOR_UNAVAILABLE")


def is_without_target(error: BaseException | None) -> bool:
    """Whether it is a coordinator's own word that no target replica is there: gRPC's errors have no other reason."""
    return (
        isinstance(error, Unavailable)
        and error.reason == Unavailable.default_reason
        and isinstance(error.__cause__, grpc.RpcError)
        and is_coordinators_word(error.__cause__)
    )


def is_coordinators_word(error: grpc.RpcError) -> bool:
    """Whether a coordinator said so itself, rather than gRPC of the way to it."""
    return isinstance(error, grpc.aio.AioRpcError | grpc.Call) and DETAILS_KEY in dict(error.trailing_metadata() or ())


def closed() -> ClientClosed:
    """A call of a client that is closed."""
    return ClientClosed("the client is closed; make a new one")
