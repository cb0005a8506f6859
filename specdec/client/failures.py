"""Maps a failed gRPC call of a client to one error of the tree. Both clients use it.

An error that gRPC or a proxy made, and no coordinator, is described in words; `grpc_text` returns gRPC's own text. Such
an error says nothing about the request. So `recovery` tries the call again, also if the status refuses a call that
a coordinator at the same endpoint has answered before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import grpc

from specdec.access.tls import Tls
from specdec.contract.errors import ClientClosed, SpecdecError, Unavailable
from specdec.rpc.credentials import describe_refused_connection
from specdec.rpc.status_mapping import from_rpc_error, http2_reset_code, is_ours

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


#: Statuses that gRPC gives a call whose connection is lost or whose time is over.
_LOST_CONNECTION = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)

#: Pause before the next attempt after a reset: the connection stands, so nothing has to restart first.
_RESET_RETRY_AFTER_S = 0.05

#: Pause before the next attempt after a proxy refused a call that was answered before.
_REFUSED_RETRY_AFTER_S = 0.5


def read_failure(
    error: grpc.RpcError, endpoint: str, tls: Tls | None = None, *, was_answered: bool = False
) -> SpecdecError:
    """Return the error of the tree for a failed call to the coordinator at `endpoint`.

    Args:
        error: exception of the call.
        endpoint: endpoint of the client.
        tls: credentials of its channel; None: plaintext.
        was_answered: whether an earlier attempt of the call was answered. A coordinator is reached through this
            endpoint then, so a refusal by something else on the way may pass.
    """
    failure = from_rpc_error(error, peer=endpoint)
    if not isinstance(error, grpc.aio.AioRpcError | grpc.Call) or is_ours(error):
        return failure
    details = error.details() or ""
    if not failure.message.startswith(f"{endpoint}: "):
        return failure  # a message that is too large
    if refused := describe_refused_connection(details, tls):
        message = f"no connection to the coordinator at {endpoint}: {refused}"
        return Unavailable(message, reason="COORDINATOR_UNAVAILABLE")
    message = _describe_other_program(details, endpoint) or _describe(error.code(), details, endpoint)
    if isinstance(failure, Unavailable):
        retry_after_s = None if http2_reset_code(details) is None else _RESET_RETRY_AFTER_S
        return Unavailable(message, reason="COORDINATOR_UNAVAILABLE", retry_after_s=retry_after_s)
    return type(failure)(message, retry_after_s=_REFUSED_RETRY_AFTER_S if was_answered else None)


def grpc_text(error: BaseException) -> str:
    """Return gRPC's own text about the failed call that `error` was raised from; "" if gRPC did not make the error."""
    rpc_error = next((each for each in _causes(error) if isinstance(each, grpc.aio.AioRpcError | grpc.Call)), None)
    if rpc_error is None or is_ours(rpc_error):
        return ""
    return rpc_error.details() or ""


def is_without_target(error: BaseException | None) -> bool:
    """Return whether a coordinator reported that it has no target replica.

    Errors of a coordinator and of gRPC may have the same class, so the gRPC error is read that `error` was raised from.
    """
    if not isinstance(error, Unavailable) or error.reason != Unavailable.default_reason:
        return False
    rpc_error = error.__cause__ or error.__context__
    return isinstance(rpc_error, grpc.RpcError) and is_ours(rpc_error)


def closed() -> ClientClosed:
    """Return the error of a call on a closed client."""
    return ClientClosed("the client is closed; make a new one")


def _describe_other_program(details: str, endpoint: str) -> str:
    """Return how a program that is no coordinator answered, and what to do about it; "" if none is known to have."""
    for pattern, answer in _OTHER_PROGRAM:
        if found := pattern.search(details):
            return f"the server at {endpoint} {found.expand(answer)}; check that the endpoint is a coordinator's"
    return ""


def _describe(code: grpc.StatusCode, details: str, endpoint: str) -> str:
    """Return why a call got no answer of a coordinator and what to do about it."""
    if (http2_code := http2_reset_code(details)) is not None:
        return (
            f"the stream to the coordinator at {endpoint} was reset on its way, with HTTP/2 code {http2_code}; check "
            "the coordinator and each proxy in front of it"
        )
    if code in _LOST_CONNECTION:
        return _describe_missing_answer(code, details, endpoint)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return (
            f"the server at {endpoint} does not serve this call: it is another program, or another version of specdec; "
            "check that the endpoint is a coordinator's"
        )
    return (
        f"the server at {endpoint} ended the call with the gRPC status {code.name} and without a reason of specdec; "
        "check that the endpoint is a coordinator's"
    )


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
