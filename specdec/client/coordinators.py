"""Which coordinator a client speaks to: the first that can be reached, until that one says that it cannot serve.

gRPC by itself goes to an endpoint's next address where a connection fails. It stays where one holds, also to a
coordinator that answers and is cut off from its store or from every target. Another connection is opened then, to all
addresses whose health says that they serve, and calls go there until none of them does. One that refuses is left at
once; one that let a call's time run out is asked first whether it serves. Sessions may move: any coordinator resumes
any session.

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
        self.doubted: _Way[ChannelT] | None = None
        """Where a call's time was over before its coordinator said so."""
        self._others: _Way[ChannelT] | None = None
        self._closed = False

    def take_doubt(self) -> _Way[ChannelT] | None:
        """What the next call has to ask whether it serves: the chosen way, or None."""
        doubted, self.doubted = self.doubted, None
        return doubted if doubted is self.chosen else None

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
        is_first, is_refused = self._way is self._coordinators.first, is_coordinators_word(error)
        if not is_refused and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._coordinators.doubted = self._way
        elif isinstance(failure, Unavailable | ResourceExhausted):
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
        self.chosen = others if await self.serves(others, patience_s, wait_for_ready=True) else self.first

    async def serves(self, way: _Way[grpc.aio.Channel], patience_s: float, *, wait_for_ready: bool = False) -> bool:
        """Whether who is there says so. Raises ClientClosed."""
        try:
            answer = await way.health.Check(_ANY_SERVICE, timeout=patience_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError:
            return False
        except (grpc.aio.UsageError, asyncio.CancelledError):  # gRPC's words for a channel that is closed meanwhile
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                self.require_open()
            raise
        return _says_serving(answer)

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
        self._coordinators.require_open()
        looks_round, doubted = self._has_to_look(), self._coordinators.take_doubt()
        if doubted is not None:
            looks_round |= not await self._coordinators.serves(doubted, _patience_s(recovery))
        if looks_round:
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
        self.chosen = others if self.serves(others, patience_s, wait_for_ready=True) else self.first

    def serves(self, way: _Way[grpc.Channel], patience_s: float, *, wait_for_ready: bool = False) -> bool:
        """Whether who is there says so. Raises ClientClosed."""
        try:
            answer = way.health.Check(_ANY_SERVICE, timeout=patience_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError:
            return False
        except ValueError:  # gRPC's word for a closed channel
            self.require_open()
            raise
        return _says_serving(answer)

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
        self._coordinators.require_open()
        looks_round, doubted = self._has_to_look(), self._coordinators.take_doubt()
        if doubted is not None:
            looks_round |= not self._coordinators.serves(doubted, _patience_s(recovery))
        if looks_round:
            self._coordinators.look_round(_patience_s(recovery))
        return self._begin(method, request, recovery)
