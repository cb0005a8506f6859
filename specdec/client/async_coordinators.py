"""Calls of an `AsyncClient` over the coordinator that it chooses, as `coordinators` describes."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from specdec.client.coordinators import AsyncConnection, AsyncConnections, AttemptNotes, health_timeout_s
from specdec.client.identity import Metadata
from specdec.client.recovery import Recovery

_ANY_SERVICE = health_pb2.HealthCheckRequest()


class AsyncCoordinators(AsyncConnections):
    """Connections of a client, and the choice among them."""

    async def choose_if_due(self, timeout_s: float) -> None:
        """Choose as `choose_serving`, unless a concurrent call has done so meanwhile."""
        async with self._checking:
            if self.health_checks.are_due:
                await self.choose_serving(timeout_s)

    async def choose_serving(self, timeout_s: float) -> None:
        """Choose the other coordinators if one of them reports SERVING within `timeout_s`, else the first one.

        Raises ClientClosed.
        """
        others = self.open_others()
        if others is None:
            return
        is_serving = await self.serves(others, timeout_s, wait_for_ready=True)
        self.chosen = others if is_serving else self.first
        self.health_checks.note(is_serving=is_serving)

    async def serves(self, connection: AsyncConnection, timeout_s: float, *, wait_for_ready: bool = False) -> bool:
        """Return whether the coordinator behind a connection reports SERVING. Raises ClientClosed."""
        check = connection.health.Check
        try:
            response = await self.answer(check, _ANY_SERVICE, timeout=timeout_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """End every call and connection. Idempotent."""
        for connection in self._close():
            await connection.channel.close()


class AsyncAttempts(AttemptNotes):
    """Attempts of one call, made one after the other."""

    def __init__(self, coordinators: AsyncCoordinators, metadata: Metadata) -> None:
        self._coordinators: AsyncCoordinators = coordinators
        self._metadata = metadata

    async def answer(self, method: str, request: Message, recovery: Recovery) -> Any:
        """Return the answer to a unary call on the chosen connection. Raises RpcError and ClientClosed."""
        return await self._coordinators.answer(
            await self._choose(method, recovery), request, timeout=recovery.remaining_s, metadata=self._metadata
        )

    async def begin(self, method: str, request: Message, recovery: Recovery) -> Any:
        """Begin a streaming call on the chosen connection. Raises ClientClosed."""
        return self._coordinators.begin(
            await self._choose(method, recovery), request, timeout=recovery.remaining_s, metadata=self._metadata
        )

    async def read(self, call: Any) -> Any:
        """Return the next message of a call that was begun; None after the last one. Raises RpcError."""
        return await self._coordinators.read(call)

    async def _choose(self, method: str, recovery: Recovery) -> Any:
        """Return the method of the chosen connection, after the checks that the last failure asked for."""
        self._coordinators.open()
        must_choose, suspect = self._take_must_choose(), self._coordinators.take_suspect()
        if suspect is not None:
            must_choose |= not await self._coordinators.serves(suspect, health_timeout_s(recovery))
        if must_choose:
            await self._coordinators.choose_serving(health_timeout_s(recovery))
        elif self._coordinators.health_checks.are_due:
            await self._coordinators.choose_if_due(health_timeout_s(recovery))
        self._coordinators.require_open()
        self._connection = self._coordinators.chosen
        return getattr(self._connection.stub, method)
