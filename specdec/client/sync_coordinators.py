# Written by `make client` from the asyncio module; change that one.
"""Calls of a `Client` over the coordinator that it chooses, as `coordinators` describes."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from specdec.client.coordinators import AttemptNotes, Connection, Connections, health_timeout_s
from specdec.client.identity import Metadata
from specdec.client.recovery import Recovery

_ANY_SERVICE = health_pb2.HealthCheckRequest()


class Coordinators(Connections):
    """Connections of a client, and the choice among them."""

    def choose_if_due(self, timeout_s: float) -> None:
        """Choose as `choose_serving`, unless a concurrent call has done so meanwhile."""
        with self._checking:
            if self.health_checks.are_due:
                self.choose_serving(timeout_s)

    def choose_serving(self, timeout_s: float) -> None:
        """Choose the other coordinators if one of them reports SERVING within `timeout_s`, else the first one.

        Raises ClientClosed.
        """
        others = self.open_others()
        if others is None:
            return
        is_serving = self.serves(others, timeout_s, wait_for_ready=True)
        self.chosen = others if is_serving else self.first
        self.health_checks.note(is_serving=is_serving)

    def serves(self, connection: Connection, timeout_s: float, *, wait_for_ready: bool = False) -> bool:
        """Return whether the coordinator behind a connection reports SERVING. Raises ClientClosed."""
        check = connection.health.Check
        try:
            response = self.answer(check, _ANY_SERVICE, timeout=timeout_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """End every call and connection. Idempotent."""
        for connection in self._close():
            connection.channel.close()


class Attempts(AttemptNotes):
    """Attempts of one call, made one after the other."""

    def __init__(self, coordinators: Coordinators, metadata: Metadata) -> None:
        self._coordinators: Coordinators = coordinators
        self._metadata = metadata

    def answer(self, method: str, request: Message, recovery: Recovery) -> Any:
        """Return the answer to a unary call on the chosen connection. Raises RpcError and ClientClosed."""
        return self._coordinators.answer(
            self._choose(method, recovery), request, timeout=recovery.remaining_s, metadata=self._metadata
        )

    def begin(self, method: str, request: Message, recovery: Recovery) -> Any:
        """Begin a streaming call on the chosen connection. Raises ClientClosed."""
        return self._coordinators.begin(
            self._choose(method, recovery), request, timeout=recovery.remaining_s, metadata=self._metadata
        )

    def read(self, call: Any) -> Any:
        """Return the next message of a call that was begun; None after the last one. Raises RpcError."""
        return self._coordinators.read(call)

    def _choose(self, method: str, recovery: Recovery) -> Any:
        """Return the method of the chosen connection, after the checks that the last failure asked for."""
        self._coordinators.open()
        must_choose, suspect = self._take_must_choose(), self._coordinators.take_suspect()
        if suspect is not None:
            must_choose |= not self._coordinators.serves(suspect, health_timeout_s(recovery))
        if must_choose:
            self._coordinators.choose_serving(health_timeout_s(recovery))
        elif self._coordinators.health_checks.are_due:
            self._coordinators.choose_if_due(health_timeout_s(recovery))
        self._coordinators.require_open()
        self._connection = self._coordinators.chosen
        return getattr(self._connection.stub, method)
