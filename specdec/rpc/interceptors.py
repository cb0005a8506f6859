"""The interceptor that turns a handler's exception into a gRPC status.

A `SpecdecError` keeps its code, reason and details. Any other exception becomes INTERNAL with a request id, and its
traceback is logged under that id. Requests are parsed here too: malformed bytes become INVALID_ARGUMENT and are logged,
at most once a second per peer. Cancellation passes through unchanged. Errors of single items in a frame are handled by
`frames`. Installed by `service_server`.
"""

from __future__ import annotations

import inspect
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import lru_cache, partial
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from specdec.contract.errors import Internal, InvalidRequest, ResourceExhausted, SpecdecError
from specdec.observability.logging import X_REQUEST_ID, bind, clean_request_id
from specdec.rpc import status_mapping
from specdec.rpc.bounds import check_num_fields
from specdec.rpc.channels import MAX_CALLS

_log = logging.getLogger(__name__)

#: Metadata key with which a caller may set the request id of the logs.
REQUEST_ID_KEY = "x-request-id"

#: Shortest interval between two log lines about the malformed messages of one peer.
LOG_INTERVAL_S = 1.0

_MAX_REMEMBERED_PEERS = 1024

#: Limit on the calls of one port at once of services that tell about it, health and reflection. Some of them last.
MAX_SIDE_CALLS = 256
_SIDE_SERVICES = "/grpc."

_FACTORIES = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def internal_error(error: BaseException, request_id: str) -> Internal:
    """Log an unexpected error with its traceback and return an error for the caller that names only the request id."""
    _log.error("unexpected %s", type(error).__name__, exc_info=error, extra={"failed_request_id": request_id})
    error.__traceback__ = None  # as in `_abort`
    return Internal(f"internal error; see the server's log for request id {request_id}")


class _Malformed(InvalidRequest):
    """The received bytes are not a message of the call's type."""


class _MalformedLog:
    """Logs malformed messages, at most once a second per peer host."""

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}

    def note(self, peer: str, error: _Malformed) -> None:
        """Log an error, unless the same host's last log line is too recent; `peer` is gRPC's text, with the port."""
        host, now_s = peer.rpartition(":")[0], time.monotonic()
        if now_s - self._last_s.get(host, float("-inf")) < LOG_INTERVAL_S:
            return
        if len(self._last_s) >= _MAX_REMEMBERED_PEERS:
            self._last_s.clear()
        self._last_s[host] = now_s
        _log.warning("refused a message from %s: %s", peer, error)


_malformed_log = _MalformedLog()


def new_request_id() -> str:
    """Return a new id that links an error answer with the log."""
    return uuid.uuid4().hex


class _Calls:
    """Calls in progress, up to a limit. A call is in progress inside the context."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num = 0

    def __enter__(self) -> None:
        if self._num >= self._limit:
            raise ResourceExhausted(f"this port already answers {self._limit} such calls, its limit; try again later")
        self._num += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._num -= 1


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps the exceptions of coroutine and async generator handlers to statuses, and asks the guard of the port.

    It also bounds the calls of the port at once.
    """

    def __init__(self, check_caller: Callable[[str, Any], None] | None = None, max_calls: int = MAX_CALLS) -> None:
        """
        Args:
            check_caller: called with method and context of each call before its request is decoded; raises
                SpecdecError to refuse it. None: every caller is answered.
            max_calls: calls at once; further ones are refused with QUEUE_FULL.
        """
        self._check_caller = check_caller
        self._calls, self._side_calls = _Calls(max_calls), _Calls(MAX_SIDE_CALLS)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        name, factory = _FACTORIES[handler.request_streaming, handler.response_streaming]
        behaviour = getattr(handler, name)
        if inspect.isasyncgenfunction(behaviour):
            wrap: Callable[..., Any] = _wrap_generator
        elif inspect.iscoroutinefunction(behaviour):
            wrap = _wrap_coroutine
        else:  # generated code of a method that the service leaves out; it would raise, and be logged, at every call
            return None
        deserializer: Any = handler.request_deserializer
        read = _reader(deserializer)
        check = _no_check if self._check_caller is None else partial(self._check_caller, handler_call_details.method)
        calls = self._side_calls if handler_call_details.method.startswith(_SIDE_SERVICES) else self._calls
        if handler.request_streaming:  # a parse error is raised where the handler asks for the next message
            return factory(wrap(behaviour, lambda messages: messages, check, calls), read, handler.response_serializer)
        # gRPC would parse the message before it calls the handler, and turn any error into UNKNOWN.
        return factory(wrap(behaviour, read, check, calls), None, handler.response_serializer)


def _no_check(context: Any) -> None:
    """Admit any caller."""


def _reader(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a function that parses a request and raises _Malformed."""
    message_type = _message_type(deserializer)

    def read(content: bytes) -> Any:
        try:
            check_num_fields(content, message_type)
            return deserializer(content)
        except DecodeError as error:
            reason = str(error)
        del content  # the traceback would keep it alive
        raise _Malformed(f"the request is not a valid {message_type.DESCRIPTOR.full_name}: {reason}")

    return read


@lru_cache(maxsize=256)
def _message_type(deserializer: Callable[[bytes], Any]) -> type[Message]:
    """Return the type of message that a deserializer returns."""
    return type(deserializer(b""))


def _wrap_coroutine(
    behaviour: Callable[[Any, Any], Awaitable[Any]],
    read: Callable[[Any], Any],
    check: Callable[[Any], None],
    calls: _Calls,
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def handle(request: Any, context: Any) -> Any:
        async with _MappedErrors(context):
            with calls:
                try:
                    check(context)
                    answering = behaviour(read(request), context)
                finally:
                    del request  # as in `_abort`
                return await answering

    return handle


def _wrap_generator(
    behaviour: Callable[[Any, Any], AsyncGenerator[Any, None]],
    read: Callable[[Any], Any],
    check: Callable[[Any], None],
    calls: _Calls,
) -> Callable[[Any, Any], Awaitable[Any]]:
    # A coroutine that writes, instead of a generator around a generator: when the call is cancelled, the handler is
    # closed at once in its own task, and not when the garbage collector finds it.
    async def handle(request: Any, context: Any) -> None:
        async with _MappedErrors(context):
            with calls:
                try:
                    check(context)
                    answering = behaviour(read(request), context)
                finally:
                    del request  # as in `_abort`
                async with aclosing(answering) as responses:
                    async for response in responses:
                        await context.write(response)

    return handle


class _MappedErrors:
    """Ends the call with the status of an exception that is raised inside the context."""

    def __init__(self, context: Any) -> None:
        self._context = context
        given = _request_id(context)
        self._request_id = given or new_request_id()
        self._binding = bind(request_id=self._request_id, **({X_REQUEST_ID: given} if given else {}))

    async def __aenter__(self) -> None:
        self._binding.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del trace  # as in `_abort`
        try:
            if isinstance(error, _Malformed):
                _malformed_log.note(self._context.peer(), error)
            if isinstance(error, SpecdecError):
                await _abort(self._context, error, self._request_id)
            # Cancellation is not an Exception, and an AbortError has already ended the call with a status.
            elif isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
                await _abort(self._context, internal_error(error, self._request_id), self._request_id)
        finally:
            self._binding.__exit__(None, None, None)


def _request_id(context: Any) -> str:
    """Return the id that the caller gave; "" for none."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str):
            return clean_request_id(value)
    return ""


async def _abort(context: Any, error: SpecdecError, request_id: str) -> None:
    rpc_status = status_mapping.to_status(error, request_id=request_id)
    # gRPC keeps the exception that ends a call, with its frames, until the garbage collector runs, which may take
    # thousands of calls. Without the traceback the request, which may have megabytes, is freed now.
    error.__traceback__ = None
    await context.abort(
        grpc.StatusCode[error.code], rpc_status.message, trailing_metadata=status_mapping.trailing_metadata(rpc_status)
    )
