"""A gRPC server that refuses calls of unknown methods before it reads their names.

grpcio decodes the name of a method that nobody registered in the loop that accepts calls. A name that is not UTF-8
raises there (seen with grpcio 1.85): the loop ends, every call in flight is cut, and the port stays closed, so one
request of 80 bytes would end a service for all its clients. Every method of our services is registered, and the core of
gRPC hands those out by name. What remains is unknown, whatever its name is. Built by `specdec.rpc.service_server`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

#: Releases without it decode a name in the task of its call, where an error ends that call alone.
_REGISTERS_METHODS = hasattr(cygrpc.AioServer, "_request_registered_call")


class _RefusingServer(cygrpc.AioServer):  # type: ignore[misc]
    """Answers every call of a method that is not registered with UNIMPLEMENTED."""

    async def _request_call(self) -> Any:
        refusals: set[asyncio.Task[None]] = set()  # the event loop alone would not keep them
        while True:
            task = asyncio.create_task(_refuse(await super()._request_call()))
            refusals.add(task)
            task.add_done_callback(refusals.discard)


async def _refuse(call: Any) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with contextlib.suppress(grpc.aio.BaseError):  # abort raises, also when the caller has left
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


def aio_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
) -> grpc.aio.Server:
    """Return a server for services whose methods are all registered, as generated code does.

    Args:
        interceptors: see `grpc.aio.server`; calls of unknown methods do not reach them.
        options: channel arguments.
    """
    if not _REGISTERS_METHODS:
        return grpc.aio.server(interceptors=interceptors, options=options)
    plain = cygrpc.AioServer
    cygrpc.AioServer = _RefusingServer
    try:
        return grpc.aio.server(interceptors=interceptors, options=options)
    finally:
        cygrpc.AioServer = plain
