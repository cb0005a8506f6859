"""The one place where an exception becomes a gRPC status.

A `SpecdecError` keeps its code, reason and details; anything else becomes INTERNAL with a request id, and its traceback
goes to the log under that id. Requests are read here too: bytes that are no message are INVALID_ARGUMENT, and a line in
the log, but one a second for each peer. Cancellation passes through untouched. Not here: errors of single items in a
frame (`frames`). Installed by `server`.
"""

from __future__ import annotations

import inspect
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import lru_cache
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from specdec.errors import Internal, InvalidRequest, SpecdecError
from specdec.observability.logging import bind
from specdec.rpc import status
from specdec.rpc.bounds import check_num_fields

_log = logging.getLogger(__name__)

#: Metadata key under which a caller may name its request in our logs.
REQUEST_ID_KEY = "x-request-id"

#: Between two lines in the log about a peer whose messages are none.
LOG_INTERVAL_S = 1.0

_MAX_REQUEST_ID_CHARACTERS = 128

_MAX_REMEMBERED_PEERS = 1024

_FACTORIES = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def internal_error(error: BaseException, request_id: str) -> Internal:
    """Logs an unexpected error with its traceback and returns what the caller may know of it."""
    _log.error("unexpected %s", type(error).__name__, exc_info=error, extra={"failed_request_id": request_id})
    error.__traceback__ = None  # as in `_abort`
    return Internal(f"internal error; the log has it under request id {request_id}")


class _Malformed(InvalidRequest):
    """What came is no message of the call's type."""


class _Complaints:
    """The log's lines about malformed messages: one a second for each peer, whatever its connections."""

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}

    def note(self, peer: str, error: _Malformed) -> None:
        """`peer` as gRPC writes it, with the port."""
        host, now_s = peer.rpartition(":")[0], time.monotonic()
        if now_s - self._last_s.get(host, float("-inf")) < LOG_INTERVAL_S:
            return
        if len(self._last_s) >= _MAX_REMEMBERED_PEERS:
            self._last_s.clear()
        self._last_s[host] = now_s
        _log.warning("refused a message of %s: %s", peer, error)


_complaints = _Complaints()


def new_request_id() -> str:
    """A fresh id for matching an answer with the log."""
    return uuid.uuid4().hex


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps what a handler raises to a status, for coroutine and async generator handlers of every kind."""

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
        else:
            return handler
        deserializer: Any = handler.request_deserializer
        read = _reader(deserializer)
        if handler.request_streaming:  # what reading a message raises, the handler meets when it asks for the next
            return factory(wrap(behaviour, lambda messages: messages), read, handler.response_serializer)
        # gRPC would read the only message before it calls the handler, and make UNKNOWN of any error.
        return factory(wrap(behaviour, read), None, handler.response_serializer)


def _reader(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """What reads a request, raising _Malformed."""
    message_type = _message_type(deserializer)

    def read(content: bytes) -> Any:
        try:
            check_num_fields(content, message_type)
            return deserializer(content)
        except DecodeError as error:
            reason = str(error)
        del content  # the error's traceback would keep it
        raise _Malformed(f"the request is no {message_type.DESCRIPTOR.full_name}: {reason}")

    return read


@lru_cache(maxsize=256)
def _message_type(deserializer: Callable[[bytes], Any]) -> type[Message]:
    """Of what it reads."""
    return type(deserializer(b""))


def _wrap_coroutine(
    behaviour: Callable[[Any, Any], Awaitable[Any]], read: Callable[[Any], Any]
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def handle(request: Any, context: Any) -> Any:
        async with _MappedErrors(context):
            try:
                answering = behaviour(read(request), context)
            finally:
                del request  # as in `_abort`
            return await answering

    return handle


def _wrap_generator(
    behaviour: Callable[[Any, Any], AsyncGenerator[Any, None]], read: Callable[[Any], Any]
) -> Callable[[Any, Any], Awaitable[Any]]:
    # A coroutine that writes, instead of a generator around a generator: when the call is cancelled, the handler is
    # closed here and now, in its own task, and not when the garbage collector finds it.
    async def handle(request: Any, context: Any) -> None:
        async with _MappedErrors(context):
            try:
                answering = behaviour(read(request), context)
            finally:
                del request  # as in `_abort`
            async with aclosing(answering) as responses:
                async for response in responses:
                    await context.write(response)

    return handle


class _MappedErrors:
    """Whatever is raised inside ends the call with its status."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._request_id = _request_id(context)
        self._binding = bind(request_id=self._request_id)

    async def __aenter__(self) -> None:
        self._binding.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del trace  # as in `_abort`
        try:
            if isinstance(error, _Malformed):
                _complaints.note(self._context.peer(), error)
            if isinstance(error, SpecdecError):
                await _abort(self._context, error, self._request_id)
            # Cancellation is none, and what has ended the call already has a status.
            elif isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
                await _abort(self._context, internal_error(error, self._request_id), self._request_id)
        finally:
            self._binding.__exit__(None, None, None)


def _request_id(context: Any) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and value:
            return value[:_MAX_REQUEST_ID_CHARACTERS]
    return new_request_id()


async def _abort(context: Any, error: SpecdecError, request_id: str) -> None:
    rpc_status = status.to_status(error, request_id=request_id)
    # gRPC keeps what ends a call, with its frames, until the collector comes, which may take thousands of calls. What
    # was asked, megabytes maybe, does not wait for that.
    error.__traceback__ = None
    await context.abort(
        grpc.StatusCode[error.code], error.message, trailing_metadata=status.trailing_metadata(rpc_status)
    )
