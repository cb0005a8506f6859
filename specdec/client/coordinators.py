"""Chooses the coordinator that a client calls, where the endpoint names several.

Such a client spreads its calls round robin over all addresses whose health service reports SERVING. While none does, it
calls over a plain connection, on which gRPC tries the next address only where connecting fails: a coordinator that is
not SERVING may still wait for a target. It looks again after 1 s, then less and less often.

A client of one address starts on the plain connection, because a proxy may stand there. After a refusal it changes to
the connection that spreads, which also finds other coordinators behind a proxy. After a call whose deadline passed, the
health of the connection is checked first. Any coordinator can resume any session.

`failures` maps errors and `recovery` decides on retries. Both clients use this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.access.tls import Signature, Tls
from specdec.client.endpoints import may_name_several
from specdec.client.failures import closed, read_failure
from specdec.client.identity import Metadata
from specdec.client.looks import Looks
from specdec.client.recovery import CHANNEL_OPTIONS, Recovery
from specdec.client.transport import resolve_proxy
from specdec.contract.errors import InvalidRequest, ResourceExhausted, SpecdecError, Unavailable, Unsupported
from specdec.rpc.channels import Options, dial, dial_blocking, forked
from specdec.rpc.status import is_ours
from specdec.v1.coordinator_pb2_grpc import CoordinatorServiceStub

#: Time that the next attempt waits for another coordinator to report SERVING.
HEALTH_TIMEOUT_S = 0.5

#: Round robin over all addresses except those whose health service does not report SERVING (gRFC A17).
_HEALTH_CHECKED_OPTIONS = (
    *CHANNEL_OPTIONS,
    (
        "grpc.service_config",
        json.dumps({"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}),
    ),
    # Without it gRPC would share the subchannel of the connection that this one replaces.
    ("grpc.use_local_subchannel_pool", 1),
)

_ANY_SERVICE = health_pb2.HealthCheckRequest()

ChannelT = TypeVar("ChannelT", grpc.Channel, grpc.aio.Channel)


@dataclass(frozen=True, slots=True)
class _Connection(Generic[ChannelT]):
    channel: ChannelT
    stub: CoordinatorServiceStub
    health: health_pb2_grpc.HealthStub

    @classmethod
    def over(cls, channel: ChannelT) -> _Connection[ChannelT]:
        return cls(channel, CoordinatorServiceStub(channel), health_pb2_grpc.HealthStub(channel))


class _Coordinators(Generic[ChannelT]):
    """Base of the blocking and the asyncio class."""

    first: _Connection[ChannelT]
    chosen: _Connection[ChannelT]

    def __init__(self, endpoint: str, tls: Tls | None) -> None:
        """Raises InvalidRequest for a proxy that cannot be used."""
        self.endpoint, self.tls, self.proxy = endpoint, tls, resolve_proxy(endpoint)
        self._process = 0
        """Process of the first call, which makes the first connection; 0 before it."""
        self.suspect: _Connection[ChannelT] | None = None
        """Connection on which a call's deadline passed without an answer."""
        self._others: _Connection[ChannelT] | None = None
        self._files: Signature = ()
        """Version of the certificate files that the connections were made with."""
        self._left: list[_Connection[ChannelT]] = []
        """Connections that were replaced, whose calls may not have ended."""
        self._closed = False
        self.looks = Looks(are_needed=may_name_several(endpoint))

    def open(self) -> None:
        """Make the first connection unless there is one. Raises ClientClosed, InvalidRequest, and as `dial`."""
        self.require_open()
        if not self._process:
            self._files = () if self.tls is None else self.tls.signature()
            self.first = self.chosen = _Connection.over(self._dial(CHANNEL_OPTIONS))
            self._process = os.getpid()
        elif self._process != os.getpid():
            raise forked()

    def note_unreached(self, connection: _Connection[ChannelT]) -> None:
        """Note that a call over a connection reached no coordinator."""
        if connection is self.chosen and connection is not self.first:
            self.looks.ask()

    def take_suspect(self) -> _Connection[ChannelT] | None:
        """Return the chosen connection if its health must be checked before the next call, and clear the mark."""
        suspect, self.suspect = self.suspect, None
        return suspect if suspect is self.chosen else None

    def renew(self) -> None:
        """Make the connections anew if the certificate files have changed and can be used.

        For a connection that TLS refused: its files may have been renewed since it was made.
        """
        if self.tls is None or self._closed or (files := self.tls.signature()) == self._files:
            return
        try:
            first = _Connection.over(self._dial(CHANNEL_OPTIONS))
        except InvalidRequest:  # they are being replaced; the next attempt looks again
            return
        self._files = files
        self._left = self._connections()
        self.first = self.chosen = first
        self._others = None
        self.looks.ask()

    def _dial(self, options: Options) -> ChannelT:
        """Return a channel to the endpoint. Raises InvalidRequest if the certificate files cannot be used."""
        raise NotImplementedError

    def _connections(self) -> list[_Connection[ChannelT]]:
        if self._process != os.getpid():
            return []  # there are none, or they are the parent's
        connections: list[_Connection[Any]] = [*self._left, self.first]
        return connections if self._others is None else [*connections, self._others]

    @property
    def is_closed(self) -> bool:
        """True once the client has closed its connections."""
        return self._closed

    def require_open(self) -> None:
        """Raise ClientClosed if the client is closed."""
        if self._closed:
            raise closed()


class _Attempts(Generic[ChannelT]):
    """Base of the attempts of one call, made one after the other."""

    _coordinators: _Coordinators[ChannelT]
    _metadata: Metadata
    _connection: _Connection[ChannelT]
    _must_choose = False
    """True if the next attempt must choose a serving coordinator first, unless another call has done so."""
    _num_lost = 0
    """Number of attempts that ended without a verdict of a coordinator."""

    def failed(self, error: grpc.RpcError, recovery: Recovery) -> SpecdecError:
        """Return the error of the last attempt, and note what the next attempt must check first."""
        endpoint, tls = self._coordinators.endpoint, self._coordinators.tls
        failure = read_failure(error, endpoint, tls, was_answered=recovery.was_answered)
        is_first, is_refused = self._connection is self._coordinators.first, is_ours(error)
        self._num_lost += not is_refused
        if isinstance(failure, Unavailable) and not is_refused:
            self._coordinators.renew()
            self._coordinators.note_unreached(self._connection)
        if not is_refused and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._coordinators.suspect = self._connection
        elif not is_refused or isinstance(failure, Unavailable | ResourceExhausted):
            # gRPC moves on by itself after a broken first connection, and after a refusal by one of the others. But the
            # connection to a proxy outlasts the coordinator behind it.
            self._must_choose = is_refused or self._num_lost > 1 if is_first else not is_refused
        return failure

    def _take_must_choose(self) -> bool:
        must_choose, self._must_choose = self._must_choose, False
        return must_choose and self._coordinators.chosen is self._connection

    def _begin(self, method: str, request: Message, recovery: Recovery) -> Any:
        self._coordinators.require_open()
        self._connection = self._coordinators.chosen
        try:
            call = getattr(self._connection.stub, method)
            return call(request, timeout=recovery.remaining_s, metadata=self._metadata)
        except ValueError:  # gRPC's error for a closed channel
            self._coordinators.require_open()
            raise


def _health_timeout_s(recovery: Recovery) -> float:
    left_s = recovery.remaining_s
    return HEALTH_TIMEOUT_S if left_s is None else min(HEALTH_TIMEOUT_S, left_s)


def _reports_serving(response: health_pb2.HealthCheckResponse) -> bool:
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


class AsyncCoordinators(_Coordinators[grpc.aio.Channel]):
    """Connections of an `AsyncClient`, for the event loop of its first call."""

    def __init__(self, endpoint: str, tls: Tls | None) -> None:
        super().__init__(endpoint, tls)
        self._looking = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        super().open()
        self._loop = self._loop or asyncio.get_running_loop()
        if self._loop is not asyncio.get_running_loop():
            raise Unsupported("an AsyncClient belongs to the event loop of its first call; make one in each loop")

    async def look(self, timeout_s: float) -> None:
        """Choose as `choose_serving`, unless a call beside this one has done so meanwhile."""
        async with self._looking:
            if self.looks.is_due():
                await self.choose_serving(timeout_s)

    async def choose_serving(self, timeout_s: float) -> None:
        """Choose the other coordinators if one of them reports SERVING within `timeout_s`, else the first one."""
        if self._others is None:
            try:
                self._others = _Connection.over(self._dial(_HEALTH_CHECKED_OPTIONS))
            except InvalidRequest:  # certificate files that are being replaced
                return
        others = self._others
        is_serving = await self.serves(others, timeout_s, wait_for_ready=True)
        self.chosen = others if is_serving else self.first
        self.looks.note(is_serving=is_serving)

    async def serves(
        self, connection: _Connection[grpc.aio.Channel], timeout_s: float, *, wait_for_ready: bool = False
    ) -> bool:
        """Return whether the coordinator behind a connection reports SERVING. Raises ClientClosed."""
        try:
            response = await connection.health.Check(_ANY_SERVICE, timeout=timeout_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError:
            return False
        except (grpc.aio.UsageError, asyncio.CancelledError):  # gRPC's errors for a channel that is closed meanwhile
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                self.require_open()
            raise
        return _reports_serving(response)

    def _dial(self, options: Options) -> grpc.aio.Channel:
        return dial(self.endpoint, options, tls=self.tls, proxy=self.proxy)

    async def close(self) -> None:
        """End every call and connection. Idempotent."""
        self._closed = True
        for connection in self._connections():
            await connection.channel.close()


class AsyncAttempts(_Attempts[grpc.aio.Channel]):
    """Attempts of one call, made one after the other."""

    def __init__(self, coordinators: AsyncCoordinators, metadata: Metadata) -> None:
        self._coordinators: AsyncCoordinators = coordinators
        self._metadata = metadata

    async def begin(self, method: str, request: Message, recovery: Recovery) -> Any:
        """Begin a call on the chosen connection, after the checks that the last failure asked for.

        Raises ClientClosed.
        """
        self._coordinators.open()
        must_choose, suspect = self._take_must_choose(), self._coordinators.take_suspect()
        if suspect is not None:
            must_choose |= not await self._coordinators.serves(suspect, _health_timeout_s(recovery))
        if must_choose:
            await self._coordinators.choose_serving(_health_timeout_s(recovery))
        elif self._coordinators.looks.is_due():
            await self._coordinators.look(_health_timeout_s(recovery))
        return self._begin(method, request, recovery)


class Coordinators(_Coordinators[grpc.Channel]):
    """Connections of a `Client`, for any number of threads."""

    def __init__(self, endpoint: str, tls: Tls | None) -> None:
        super().__init__(endpoint, tls)
        self._lock, self._looking = threading.Lock(), threading.Lock()

    def open(self) -> None:
        with contextlib.nullcontext() if self._process else self._lock:  # the lock may be held for ever after a fork
            super().open()

    def look(self, timeout_s: float) -> None:
        """Choose as `choose_serving`, unless a call beside this one has done so meanwhile."""
        with self._looking:
            if self.looks.is_due():
                self.choose_serving(timeout_s)

    def choose_serving(self, timeout_s: float) -> None:
        """Choose the other coordinators if one of them reports SERVING within `timeout_s`, else the first one.

        Raises ClientClosed.
        """
        with self._lock:
            self.require_open()
            if self._others is None:
                try:
                    self._others = _Connection.over(self._dial(_HEALTH_CHECKED_OPTIONS))
                except InvalidRequest:  # certificate files that are being replaced
                    return
            others = self._others
        is_serving = self.serves(others, timeout_s, wait_for_ready=True)
        self.chosen = others if is_serving else self.first
        self.looks.note(is_serving=is_serving)

    def serves(self, connection: _Connection[grpc.Channel], timeout_s: float, *, wait_for_ready: bool = False) -> bool:
        """Return whether the coordinator behind a connection reports SERVING. Raises ClientClosed."""
        try:
            response = connection.health.Check(_ANY_SERVICE, timeout=timeout_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError:
            return False
        except ValueError:  # gRPC's error for a closed channel
            self.require_open()
            raise
        return _reports_serving(response)

    def renew(self) -> None:
        with self._lock:
            super().renew()

    def _dial(self, options: Options) -> grpc.Channel:
        return dial_blocking(self.endpoint, options, tls=self.tls, proxy=self.proxy)

    def close(self) -> None:
        """End every call and connection. Idempotent."""
        with self._lock:
            self._closed = True
            connections = self._connections()
        for connection in connections:
            connection.channel.close()


class Attempts(_Attempts[grpc.Channel]):
    """Attempts of one call, made one after the other."""

    def __init__(self, coordinators: Coordinators, metadata: Metadata) -> None:
        self._coordinators: Coordinators = coordinators
        self._metadata = metadata

    def begin(self, method: str, request: Message, recovery: Recovery) -> Any:
        """Begin a call on the chosen connection, after the checks that the last failure asked for.

        Raises ClientClosed.
        """
        self._coordinators.open()
        must_choose, suspect = self._take_must_choose(), self._coordinators.take_suspect()
        if suspect is not None:
            must_choose |= not self._coordinators.serves(suspect, _health_timeout_s(recovery))
        if must_choose:
            self._coordinators.choose_serving(_health_timeout_s(recovery))
        elif self._coordinators.looks.is_due():
            self._coordinators.look(_health_timeout_s(recovery))
        return self._begin(method, request, recovery)
