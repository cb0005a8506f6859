"""A service that accepts every call and answers none, as a hung process does, for tests of links and pools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc


class _Handler(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(_wait)


async def _wait(request: bytes, context: Any) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def silent_service() -> AsyncIterator[str]:
    """Run the service; yield its address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
