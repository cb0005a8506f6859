"""The one place where an exception becomes a gRPC status.

A `SpecdecError` keeps its code, reason and details; anything else becomes INTERNAL with a request id, and its traceback
goes to the log under that id. Requests are read here too: bytes that are no message are INVALID_ARGUMENT, and a line in
the log, but one a second for each peer. Cancellation passes through untouched. Not here: errors of single items in a
frame (`frames`). Installed by `server`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import lru_cache
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

_MAX_REQUEST_ID_CHARACTERS = 128

_COMPLAINT_INTERVAL_S = 1.0
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
        if now_s - self._last_s.get(host, float("-inf")) < _COMPLAINT_INTERVAL_S:
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
        async with _mapped_errors(context):
            return await behaviour(read(request), context)

    return handle


def _wrap_generator(
    behaviour: Callable[[Any, Any], AsyncGenerator[Any, None]], read: Callable[[Any], Any]
) -> Callable[[Any, Any], Awaitable[Any]]:
    # A coroutine that writes, instead of a generator around a generator: when the call is cancelled, the handler is
    # closed here and now, in its own task, and not when the garbage collector finds it.
    async def handle(request: Any, context: Any) -> None:
        async with _mapped_errors(context), aclosing(behaviour(read(request), context)) as responses:
            async for response in responses:
                await context.write(response)

    return handle


@asynccontextmanager
async def _mapped_errors(context: Any) -> AsyncIterator[None]:
    request_id = _request_id(context)
    with bind(request_id=request_id):
        try:
            yield
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except _Malformed as error:
            _complaints.note(context.peer(), error)
            await _abort(context, error, request_id)
        except SpecdecError as error:
            await _abort(context, error, request_id)
        except Exception as error:
            await _abort(context, internal_error(error, request_id), request_id)


def _request_id(context: Any) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and value:
            return value[:_MAX_REQUEST_ID_CHARACTERS]
    return new_request_id()


async def _abort(context: Any, error: SpecdecError, request_id: str) -> None:
    rpc_status = status.to_status(error, request_id=request_id)
    await context.abort(
        grpc.StatusCode[error.code], error.message, trailing_metadata=status.trailing_metadata(rpc_status)
    )
