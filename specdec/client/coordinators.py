"""Which coordinator a client speaks to: the first that can be reached, until that one says that it cannot serve.

gRPC by itself goes to an endpoint's next address where a connection fails. It stays where one holds, also to a
coordinator that answers and is cut off from its store or from every target. Another connection is opened then, to all
addresses whose health says that they serve, and calls go there until one of them fails. Sessions may move: any
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

from specdec.client.endpoints import check_endpoint
from specdec.client.failures import closed, is_coordinators_word, read_failure
from specdec.client.recovery import CHANNEL_OPTIONS
from specdec.errors import ResourceExhausted, SpecdecError, Unavailable
from specdec.rpc.channels import dial, dial_blocking
from specdec.v1.coordinator_pb2_grpc import CoordinatorServiceStub

#: How long a failed call waits for another coordinator to say that it serves.
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

ChannelT = TypeVar("ChannelT", grpc.Channel, grpc.aio.Channel)


@dataclass(frozen=True, slots=True)
class _Way(Generic[ChannelT]):
    channel: ChannelT
    stub: CoordinatorServiceStub

    @classmethod
    def over(cls, channel: ChannelT) -> _Way[ChannelT]:
        return cls(channel, CoordinatorServiceStub(channel))


class _Coordinators(Generic[ChannelT]):
    """What both kinds share."""

    def __init__(self, endpoint: str, first: ChannelT) -> None:
        self._endpoint = endpoint
        self._first: _Way[ChannelT] = _Way.over(first)
        self._others: _Way[ChannelT] | None = None
        self._chosen: _Way[ChannelT] = self._first
        self._closed = False

    @property
    def way(self) -> _Way[ChannelT]:
        """Of the next call. Raises ClientClosed."""
        if self._closed:
            raise closed()
        return self._chosen

    def _read(self, error: grpc.RpcError, way: _Way[ChannelT]) -> tuple[SpecdecError, bool]:
        """What a call ended with, and whether another coordinator may do better; `way` is left where it was not the
        first one's."""
        failure = read_failure(error, self._endpoint)
        may_pass = isinstance(failure, Unavailable | ResourceExhausted)
        if may_pass and way is not self._first:
            self._chosen = self._first
            return failure, False
        return failure, may_pass and is_coordinators_word(error) and self._chosen is self._first and not self._closed

    def call(self, way: _Way[ChannelT], method: str, request: Message, timeout_s: float | None) -> Any:
        """Begins a call. Raises ClientClosed."""
        try:
            return getattr(way.stub, method)(request, timeout=timeout_s)
        except ValueError:  # what gRPC says of a closed channel
            if self._closed:
                raise closed() from None
            raise


class AsyncCoordinators(_Coordinators[grpc.aio.Channel]):
    """For the running event loop."""

    def __init__(self, endpoint: str) -> None:
        """Connects at the first call. Raises InvalidRequest: an endpoint that cannot be one."""
        super().__init__(endpoint, dial(check_endpoint(endpoint), CHANNEL_OPTIONS))

    async def failed(self, error: grpc.RpcError, way: _Way[grpc.aio.Channel]) -> SpecdecError:
        """What a call over `way` ended with; the next one goes to another coordinator where that may help."""
        failure, is_left = self._read(error, way)
        if is_left:
            if self._others is None:
                self._others = _Way.over(dial(self._endpoint, _SERVING_ONES))
            if await _connects(self._others.channel) and not self._closed:
                self._chosen = self._others
        return failure

    async def close(self) -> None:
        """Ends every call and connection. Idempotent."""
        self._closed = True
        await self._first.channel.close()
        if self._others is not None:
            await self._others.channel.close()


async def _connects(channel: grpc.aio.Channel) -> bool:
    """Whether it has a coordinator that serves, now or soon."""
    try:
        async with asyncio.timeout(LOOK_ROUND_S):
            while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)
    except TimeoutError:
        return False
    return True


class Coordinators(_Coordinators[grpc.Channel]):
    """For threads, any number of them."""

    def __init__(self, endpoint: str) -> None:
        """Connects at the first call. Raises InvalidRequest: an endpoint that cannot be one."""
        super().__init__(endpoint, dial_blocking(check_endpoint(endpoint), CHANNEL_OPTIONS))
        self._lock = threading.Lock()
        self._connected = threading.Event()
        """Whether the others have one that serves."""

    def failed(self, error: grpc.RpcError, way: _Way[grpc.Channel]) -> SpecdecError:
        """What a call over `way` ended with; the next one goes to another coordinator where that may help."""
        with self._lock:
            failure, is_left = self._read(error, way)
            if is_left and self._others is None:
                self._others = _Way.over(dial_blocking(self._endpoint, _SERVING_ONES))
                self._others.channel.subscribe(self._note_state, try_to_connect=True)
        if is_left and self._connected.wait(LOOK_ROUND_S):
            with self._lock:
                if self._others is not None and not self._closed:
                    self._chosen = self._others
        return failure

    def _note_state(self, state: grpc.ChannelConnectivity) -> None:
        if state is grpc.ChannelConnectivity.READY:
            self._connected.set()
        else:
            self._connected.clear()

    def close(self) -> None:
        """Ends every call and connection. Idempotent."""
        with self._lock:
            self._closed = True
            ways = [way for way in (self._first, self._others) if way is not None]
        for way in ways:
            way.channel.close()
