"""The one place where an exception becomes a gRPC status.

A `SpecdecError` keeps its code, reason and details; anything else becomes INTERNAL with a request id, and its traceback
goes to the log under that id. Cancellation passes through untouched. Not here: errors of single items in a frame
(`frames`). Installed by `server`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from specdec.errors import Internal, SpecdecError
from specdec.observability.logging import bind
from specdec.rpc import status

_log = logging.getLogger(__name__)

#: Metadata key under which a caller may name its request in our logs.
REQUEST_ID_KEY = "x-request-id"

_MAX_REQUEST_ID_CHARACTERS = 128

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
            wrapped: Any = _wrap_generator(behaviour)
        elif inspect.iscoroutinefunction(behaviour):
            wrapped = _wrap_coroutine(behaviour)
        else:
            return handler
        return factory(wrapped, handler.request_deserializer, handler.response_serializer)


def _wrap_coroutine(behaviour: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def handle(request: Any, context: Any) -> Any:
        async with _mapped_errors(context):
            return await behaviour(request, context)

    return handle


def _wrap_generator(behaviour: Callable[[Any, Any], AsyncGenerator[Any, None]]) -> Callable[[Any, Any], Awaitable[Any]]:
    # A coroutine that writes, instead of a generator around a generator: when the call is cancelled, the handler is
    # closed here and now, in its own task, and not when the garbage collector finds it.
    async def handle(request: Any, context: Any) -> None:
        async with _mapped_errors(context), aclosing(behaviour(request, context)) as responses:
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
