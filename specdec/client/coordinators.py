"""Chooses the coordinator that a client calls, if the endpoint names several.

Such a client spreads its calls round robin over all addresses whose health service reports SERVING. While none does, it
calls over a plain connection, on which gRPC tries the next address only if connecting fails: a coordinator that is
not SERVING may still wait for a target. It checks their health again after 1 s, then less and less often.

A client of one address starts on the plain connection, because a proxy may stand there. After a refusal it changes to
the connection that spreads, which also finds other coordinators behind a proxy. After a call whose deadline passed, the
health of the connection is checked first. Any coordinator can resume any session.

`async_coordinators` makes the checks and calls; `sync_coordinators` is generated from it. Here is the state that both
share, and the differences between gRPC's two APIs. `failures` maps errors and `recovery` decides on retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2_grpc

from specdec.access.tls import Signature, Tls
from specdec.client.endpoints import may_name_several
from specdec.client.failures import closed, read_failure
from specdec.client.recovery import CHANNEL_OPTIONS, Recovery
from specdec.client.transport import resolve_proxy
from specdec.contract.errors import InvalidRequest, ResourceExhausted, SpecdecError, Unavailable, Unsupported
from specdec.rpc.channels import Options, dial, dial_blocking, forked
from specdec.rpc.status_mapping import is_ours
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

#: Pauses between two health checks while no coordinator reports SERVING.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0

ChannelT = TypeVar("ChannelT", grpc.Channel, grpc.aio.Channel)


@dataclass(frozen=True, slots=True)
class _Connection(Generic[ChannelT]):
    channel: ChannelT
    stub: CoordinatorServiceStub
    health: health_pb2_grpc.HealthStub

    @classmethod
    def over(cls, channel: ChannelT) -> _Connection[ChannelT]:
        return cls(channel, CoordinatorServiceStub(channel), health_pb2_grpc.HealthStub(channel))


AsyncConnection = _Connection[grpc.aio.Channel]
Connection = _Connection[grpc.Channel]


class _HealthChecks:
    """Times of health checks: one before the first call, and further ones while no coordinator is known to serve."""

    def __init__(self, *, are_needed: bool) -> None:
        """`are_needed`: whether the endpoint may name several coordinators; otherwise no check is ever due."""
        self._are_needed = are_needed
        self._due_s = 0.0
        self._pause_s = _FIRST_PAUSE_S

    @property
    def are_due(self) -> bool:
        """True if health must be checked before the next call."""
        return self._are_needed and time.monotonic() >= self._due_s

    def request(self) -> None:
        """Make a check due now."""
        self._due_s = 0.0

    def note(self, *, is_serving: bool) -> None:
        """Note the result of a check. The pauses between checks that find none serving double."""
        if is_serving:
            self._pause_s, self._due_s = _FIRST_PAUSE_S, float("inf")
        else:
            self._due_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


class _Connections(Generic[ChannelT]):
    """Base of the connections of one client."""

    first: _Connection[ChannelT]
    chosen: _Connection[ChannelT]

    def __init__(self, endpoint: str, tls: Tls | None) -> None:
        """Raises InvalidRequest for a proxy that cannot be used."""
        self.endpoint, self.tls, self._proxy = endpoint, tls, resolve_proxy(endpoint)
        self._changing = threading.Lock()
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
        self.health_checks = _HealthChecks(are_needed=may_name_several(endpoint))

    def open(self) -> None:
        """Make the first connection unless there is one. Raises ClientClosed, InvalidRequest, and as `dial`."""
        with contextlib.nullcontext() if self._process else self._changing:  # a fork may leave the lock locked
            self.require_open()
            if not self._process:
                self._files = () if self.tls is None else self.tls.signature()
                self.first = self.chosen = _Connection.over(self._dial(CHANNEL_OPTIONS))
                self._process = os.getpid()
            elif self._process != os.getpid():
                raise forked()

    def open_others(self) -> _Connection[ChannelT] | None:
        """Return the connection that spreads calls; None while the certificate files are replaced.

        Raises ClientClosed.
        """
        with self._changing:
            self.require_open()
            if self._others is None:
                with contextlib.suppress(InvalidRequest):
                    self._others = _Connection.over(self._dial(_HEALTH_CHECKED_OPTIONS))
            return self._others

    def note_unreached(self, connection: _Connection[ChannelT]) -> None:
        """Note that a call over a connection reached no coordinator."""
        if connection is self.chosen and connection is not self.first:
            self.health_checks.request()

    def take_suspect(self) -> _Connection[ChannelT] | None:
        """Return the chosen connection if its health must be checked before the next call, and clear the mark."""
        suspect, self.suspect = self.suspect, None
        return suspect if suspect is self.chosen else None

    def renew(self) -> None:
        """Make the connections anew if the certificate files have changed and can be used.

        For a connection that TLS refused: its files may have been renewed since it was made.
        """
        with self._changing:
            if self.tls is None or self._closed or (files := self.tls.signature()) == self._files:
                return
            try:
                first = _Connection.over(self._dial(CHANNEL_OPTIONS))
            except InvalidRequest:  # they are being replaced; the next attempt tries again
                return
            self._files = files
            self._left = self._connections()
            self.first = self.chosen = first
            self._others = None
            self.health_checks.request()

    def begin(self, method: Any, request: Message, **options: Any) -> Any:
        """Begin a call of a stub's method. Raises ClientClosed."""
        try:
            return method(request, **options)
        except ValueError:  # gRPC's error for a closed channel
            self.require_open()
            raise

    def _dial(self, options: Options) -> ChannelT:
        """Return a channel to the endpoint. Raises InvalidRequest if the certificate files cannot be used."""
        raise NotImplementedError

    def _close(self) -> list[_Connection[ChannelT]]:
        """Return the connections that are to be closed, and refuse further calls."""
        with self._changing:
            self._closed = True
            return self._connections()

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


class AsyncConnections(_Connections[grpc.aio.Channel]):
    """Connections by gRPC's asyncio API, for the event loop of the first call."""

    def __init__(self, endpoint: str, tls: Tls | None) -> None:
        super().__init__(endpoint, tls)
        self._checking = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        super().open()
        self._loop = self._loop or asyncio.get_running_loop()
        if self._loop is not asyncio.get_running_loop():
            raise Unsupported("an AsyncClient belongs to the event loop of its first call; make one in each loop")

    async def answer(self, method: Any, request: Message, **options: Any) -> Any:
        """Return the answer to a unary call of a stub's method. Raises RpcError and ClientClosed."""
        call = self.begin(method, request, **options)
        try:
            return await call
        except (grpc.aio.UsageError, asyncio.CancelledError):  # gRPC's errors for a channel that is closed meanwhile
            if not _is_task_cancelled():
                self.require_open()
            raise

    async def read(self, call: Any) -> Any:
        """Return the next message of a call; None after the last one, or after the call was cancelled here.

        Raises RpcError.
        """
        try:
            message = await call.read()
        except asyncio.CancelledError:  # gRPC raises it, too, for a call that another task has cancelled
            if _is_task_cancelled():
                raise
            return None
        return None if message is grpc.aio.EOF else message

    def _dial(self, options: Options) -> grpc.aio.Channel:
        return dial(self.endpoint, options, tls=self.tls, proxy=self._proxy)


class Connections(_Connections[grpc.Channel]):
    """Connections by gRPC's blocking API, for any number of threads."""

    def __init__(self, endpoint: str, tls: Tls | None) -> None:
        super().__init__(endpoint, tls)
        self._checking = threading.Lock()

    def answer(self, method: Any, request: Message, **options: Any) -> Any:
        """Return the answer to a unary call of a stub's method. Raises RpcError and ClientClosed."""
        return self.begin(method, request, **options)

    def read(self, call: Any) -> Any:
        """Return the next message of a call; None after the last one. Raises RpcError."""
        return next(call, None)

    def _dial(self, options: Options) -> grpc.Channel:
        return dial_blocking(self.endpoint, options, tls=self.tls, proxy=self._proxy)


class AttemptNotes:
    """What the attempts of one call have found, for the next one."""

    _coordinators: _Connections[Any]
    _connection: _Connection[Any]
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


def health_timeout_s(recovery: Recovery) -> float:
    """Return how long an attempt may wait for the health of a coordinator."""
    left_s = recovery.remaining_s
    return HEALTH_TIMEOUT_S if left_s is None else min(HEALTH_TIMEOUT_S, left_s)


def _is_task_cancelled() -> bool:
    """Return whether the running task itself is being cancelled."""
    task = asyncio.current_task()
    return task is None or bool(task.cancelling())
