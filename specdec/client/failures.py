"""Maps a failed gRPC call of a client to one error of the tree. Both clients use it.

An error that gRPC made, and no coordinator, is described in words; `grpc_text` returns gRPC's own text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import grpc

from specdec.errors import ClientClosed, SpecdecError, Unavailable, Unsupported
from specdec.rpc.credentials import describe_refused_connection
from specdec.rpc.status import DETAILS_KEY, from_rpc_error
from specdec.tls import Tls

_UNAVAILABLE = "COORDINATOR_UNAVAILABLE"

#: What another program at the endpoint does, by a part of gRPC's message. The first match counts.
_OTHER_PROGRAM = (
    (re.compile("http1"), "speaks HTTP/1, not gRPC"),
    (re.compile("SETTINGS frame"), "does not answer in gRPC"),
    (re.compile(r"http2 header with status: (\d+)"), r"answered with HTTP status \1 instead of gRPC"),
)

#: Why no connection was made, by a part of gRPC's message. Some parts depend on its resolver. The first match counts.
_NOT_CONNECTED = (
    (re.compile("refused"), "the connection was refused"),
    (re.compile("resolution|resolving|lookup failed"), "the host name has no address"),
    (re.compile("failed to connect to all addresses|connections to all backends failing"), "no connection was made"),
)


def read_failure(error: grpc.RpcError, endpoint: str, tls: Tls | None = None) -> SpecdecError:
    """Return the error of the tree for a failed call to the coordinator at `endpoint`, dialled with `tls`."""
    failure = from_rpc_error(error, peer=endpoint)
    if not isinstance(error, grpc.aio.AioRpcError | grpc.Call) or is_from_coordinator(error):
        return failure
    details = error.details() or ""
    other_program = _describe_other_program(details, endpoint)
    if refused := describe_refused_connection(details, tls):
        return Unavailable(f"no connection to the coordinator at {endpoint}: {refused}", reason=_UNAVAILABLE)
    if isinstance(failure, Unavailable):
        message = other_program or _describe_missing_answer(error.code(), details, endpoint)
        return Unavailable(message, reason=_UNAVAILABLE)
    if other_program:
        return type(failure)(other_program)
    if isinstance(failure, Unsupported):
        return Unsupported(
            f"the server at {endpoint} does not serve this call: it is another program, or another version of specdec; "
            "check that the endpoint is a coordinator's"
        )
    if failure.message.startswith(f"{endpoint}: "):
        return type(failure)(
            f"the server at {endpoint} ended the call with the gRPC status {error.code().name} and without a reason of "
            "specdec; check that the endpoint is a coordinator's"
        )
    return failure  # a message that is too large


def grpc_text(error: BaseException) -> str:
    """Return gRPC's own text about the failed call that `error` was raised from; "" if gRPC did not make the error."""
    rpc_error = next((each for each in _causes(error) if isinstance(each, grpc.aio.AioRpcError | grpc.Call)), None)
    if rpc_error is None or is_from_coordinator(rpc_error):
        return ""
    return rpc_error.details() or ""


def is_without_target(error: BaseException | None) -> bool:
    """Return whether a coordinator reported that it has no target replica.

    Errors of a coordinator and of gRPC may have the same class, so the gRPC error is read that `error` was raised from.
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


def _describe_other_program(details: str, endpoint: str) -> str:
    """Return how a program that is no coordinator answered, and what to do about it; "" if none is known to have."""
    for pattern, answer in _OTHER_PROGRAM:
        if found := pattern.search(details):
            return f"the server at {endpoint} {found.expand(answer)}; check that the endpoint is a coordinator's"
    return ""


def _describe_missing_answer(code: grpc.StatusCode, details: str, endpoint: str) -> str:
    """Return why a call got no answer and what to do about it."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the coordinator at {endpoint} did not answer in time"
    if code is grpc.StatusCode.CANCELLED:
        return f"the call to the coordinator at {endpoint} was cancelled on its way"
    for pattern, cause in _NOT_CONNECTED:
        if pattern.search(details):
            return f"no coordinator at {endpoint}: {cause}; start one with `specdec up`, or name another endpoint"
    return f"the connection to the coordinator at {endpoint} was lost; check that it runs, with `specdec status`"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from. An error that a client raised has a context without a cause."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
