"""Which coordinator a client speaks to: the first that can be reached, until that one says that it cannot serve.

gRPC by itself goes to an endpoint's next address where a connection fails. It stays where one holds, also to a
coordinator that answers and is cut off from its store or from every target. Another connection is opened then, to all
addresses whose health says that they serve, and calls go there until none of them does. Sessions may move: any
coordinator resumes any session.

Not here: what a failure means (`failures`), whether a call is tried again (`recovery`). Called by both clients.
"""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client.endpoints import check_endpoint
from specdec.client.failures import closed, is_coordinators_word, read_failure
from specdec.client.recovery import CHANNEL_OPTIONS, Recovery
from specdec.errors import ResourceExhausted, SpecdecError, Unavailable
from specdec.rpc.channels import dial, dial_blocking
from specdec.v1.coordinator_pb2_grpc import CoordinatorServiceStub

#: How long the next attempt waits for another coordinator to say that it serves.
LOOK_ROUND_S = 0.5

#: All addresses by turns, without those whose health does not say SERVING (gRFC A17).
_SERVING_ONES = (
    *CHANNEL_OPTIONS,
    (
        "grpc.service_config",
        json.dumps({"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}),
    ),
    # A connection of its own, or it would be the one that is left.
    ("grpc.use_local_subchannel_pool", 1),
)

_ANY_SERVICE = health_pb2.HealthCheckRequest()
_UNKNOWN = health_pb2.HealthCheckResponse()

ChannelT = TypeVar("ChannelT", grpc.Channel, grpc.aio.Channel)


@dataclass(frozen=True, slots=True)
class _Way(Generic[ChannelT]):
    channel: ChannelT
    stub: CoordinatorServiceStub
    health: health_pb2_grpc.HealthStub

    @classmethod
    def over(cls, channel: ChannelT) -> _Way[ChannelT]:
        return cls(channel, CoordinatorServiceStub(channel), health_pb2_grpc.HealthStub(channel))


class _Coordinators(Generic[ChannelT]):
    """What both kinds share."""

    def __init__(self, endpoint: str, first: ChannelT) -> None:
        self.endpoint = endpoint
        self.first: _Way[ChannelT] = _Way.over(first)
        self.chosen: _Way[ChannelT] = self.first
        self._others: _Way[ChannelT] | None = None
        self._closed = False

    def require_open(self) -> None:
        """Raises ClientClosed."""
        if self._closed:
            raise closed()


class _Attempts(Generic[ChannelT]):
    """Of one call, one after the other. What both kinds share."""

    _coordinators: _Coordinators[ChannelT]
    _way: _Way[ChannelT]
    _looks_round = False
    """Whether another coordinator is to be looked for before the next one, unless another call has found one."""

    def failed(self, error: grpc.RpcError) -> SpecdecError:
        """What the last attempt ended with."""
        failure = read_failure(error, self._coordinators.endpoint)
        if isinstance(failure, Unavailable | ResourceExhausted):
            is_first, is_refused = self._way is self._coordinators.first, is_coordinators_word(error)
            # gRPC itself goes on from a first one that broke, and from one of the others that refuses to the next.
            self._looks_round = is_refused if is_first else not is_refused
        return failure

    def _has_to_look(self) -> bool:
        looks_round, self._looks_round = self._looks_round, False
        return looks_round and self._coordinators.chosen is self._way

    def _begin(self, method: str, request: Message, recovery: Recovery) -> Any:
        self._coordinators.require_open()
        self._way = self._coordinators.chosen
        try:
            return getattr(self._way.stub, method)(request, timeout=recovery.remaining_s)
        except ValueError:  # what gRPC says of a closed channel
            self._coordinators.require_open()
            raise


def _patience_s(recovery: Recovery) -> float:
    left_s = recovery.remaining_s
    return LOOK_ROUND_S if left_s is None else min(LOOK_ROUND_S, left_s)


def _says_serving(answer: health_pb2.HealthCheckResponse) -> bool:
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class AsyncCoordinators(_Coordinators[grpc.aio.Channel]):
    """For the running event loop."""

    def __init__(self, endpoint: str) -> None:
        """Connects at the first call. Raises InvalidRequest: an endpoint that cannot be one."""
        super().__init__(endpoint, dial(check_endpoint(endpoint), CHANNEL_OPTIONS))

    async def look_round(self, patience_s: float) -> None:
        """Chooses the others if one of them serves, now or soon, else the first."""
        if self._others is None:
            self._others = _Way.over(dial(self.endpoint, _SERVING_ONES))
        others = self._others
        try:
            answer = await others.health.Check(_ANY_SERVICE, timeout=patience_s, wait_for_ready=True)
        except grpc.RpcError:
            answer = _UNKNOWN
        except (grpc.aio.UsageError, asyncio.CancelledError):  # gRPC's words for a channel that is closed meanwhile
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                self.require_open()
            raise
        self.chosen = others if _says_serving(answer) else self.first

    async def close(self) -> None:
        """Ends every call and connection. Idempotent."""
        self._closed = True
        await self.first.channel.close()
        if self._others is not None:
            await self._others.channel.close()


class AsyncAttempts(_Attempts[grpc.aio.Channel]):
    """Of one call, one after the other."""

    def __init__(self, coordinators: AsyncCoordinators) -> None:
        self._coordinators: AsyncCoordinators = coordinators

    async def begin(self, method: str, request: Message, recovery: Recovery) -> Any:
        """The call, begun. Raises ClientClosed."""
        if self._has_to_look():
            self._coordinators.require_open()
            await self._coordinators.look_round(_patience_s(recovery))
        return self._begin(method, request, recovery)


class Coordinators(_Coordinators[grpc.Channel]):
    """For threads, any number of them."""

    def __init__(self, endpoint: str) -> None:
        """Connects at the first call. Raises InvalidRequest: an endpoint that cannot be one."""
        super().__init__(endpoint, dial_blocking(check_endpoint(endpoint), CHANNEL_OPTIONS))
        self._lock = threading.Lock()

    def look_round(self, patience_s: float) -> None:
        """Chooses the others if one of them serves, now or soon, else the first. Raises ClientClosed."""
        with self._lock:
            self.require_open()
            if self._others is None:
                self._others = _Way.over(dial_blocking(self.endpoint, _SERVING_ONES))
            others = self._others
        try:
            answer = others.health.Check(_ANY_SERVICE, timeout=patience_s, wait_for_ready=True)
        except grpc.RpcError:
            answer = _UNKNOWN
        except ValueError:  # gRPC's word for a closed channel
            self.require_open()
            raise
        self.chosen = others if _says_serving(answer) else self.first

    def close(self) -> None:
        """Ends every call and connection. Idempotent."""
        with self._lock:
            self._closed = True
            ways = [way for way in (self.first, self._others) if way is not None]
        for way in ways:
            way.channel.close()


class Attempts(_Attempts[grpc.Channel]):
    """Of one call, one after the other."""

    def __init__(self, coordinators: Coordinators) -> None:
        self._coordinators: Coordinators = coordinators

    def begin(self, method: str, request: Message, recovery: Recovery) -> Any:
        """The call, begun. Raises ClientClosed."""
        if self._has_to_look():
            self._coordinators.look_round(_patience_s(recovery))
        return self._begin(method, request, recovery)
