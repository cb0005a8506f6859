"""What the draft and the target servicer have in common: streams, scores, release, identity, drain, metrics.

A round's item comes here from a frame (`specdec.rpc.frames`), goes through the service's own `servicer` into its engine
(`specdec.engine_api`), a proposer or a verifier, and the reply the same way back.

Not here: which messages travel and what the engine is asked (a service's `servicer`, which builds on this).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from google.protobuf.message import Message

from specdec.engine_api import Engine
from specdec.errors import InvalidRequest, Unavailable
from specdec.observability.metrics import EngineMetrics
from specdec.rpc import codec
from specdec.rpc.device_thread_socket import DeviceThreadSocket
from specdec.rpc.frames import FrameServer
from specdec.rpc.identity import shake_hands_with_caller
from specdec.rpc.rounds import tenant_of
from specdec.rpc.stages import encode_stages
from specdec.rpc.unix_socket_server import UnixSocketHost, UnixSocketServer
from specdec.tenant import session_on_replica
from specdec.types import EngineInfo, Stages
from specdec.v1 import common_pb2

#: Sessions that one call may free.
MAX_RELEASED_SESSIONS = 4096


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply item, and what its call is counted by."""

    message: Any
    num_committed_tokens: int
    num_cached_tokens: int
    num_draft_tokens: int
    decoded_s: float
    """When its request had been read and checked, by `time.monotonic`."""
    answered_s: float
    """When the engine had answered."""
    stages: Stages | None
    """What the engine says of when it did what, by the same clock; None where nobody asked."""


class ReplicaServicer:
    """Serves one engine to any number of links. Use from one event loop."""

    def __init__(
        self,
        engine: Engine,
        metrics: EngineMetrics,
        *,
        items_of: Callable[[Any], Sequence[Any]],
        request_type: type[Message],
        reply_type: Callable[..., Any],
        frame_of: Callable[[list[Any]], Any],
    ) -> None:
        """`request_type`: of a frame of requests. The others are as `FrameServer` takes them."""
        self._served = engine
        self._metrics = metrics
        self._limits = engine.info()
        self._incarnation = secrets.token_hex(8)
        self._frames = FrameServer(
            items_of=items_of, answer=self._count_answer, reply_type=reply_type, frame_of=frame_of
        )
        self._request_type = request_type
        self._unix_socket: UnixSocketServer | None = None
        self._device_thread_socket: DeviceThreadSocket | None = None

    def info(self) -> EngineInfo:
        """What the replica is now; draining from `drain` on."""
        engine_info = self._served.info()
        draining = engine_info.draining or self._frames.draining
        return replace(
            engine_info,
            draining=draining,
            incarnation=self._incarnation,
            lane="" if self._unix_socket is None else self._unix_socket.name,
            device_lane="" if self._device_thread_socket is None else self._device_thread_socket.name,
        )

    def drain(self) -> None:
        """Refuses new calls with DRAINING; streams end once what is in flight is answered."""
        self._frames.drain()

    async def open_unix_sockets(self, max_frame_bytes: int) -> None:
        """Takes frames over Unix sockets, too, which `info` names from now on."""
        make_host = partial(UnixSocketHost, self._frames, self._request_type, self.info, max_frame_bytes)
        self._unix_socket = UnixSocketServer(make_host())
        await self._unix_socket.start()
        device_loop = self._served.share_event_loop()
        if device_loop is not None:
            self._device_thread_socket = DeviceThreadSocket(self._served, device_loop, make_host())
            self._device_thread_socket.open()

    async def close_unix_sockets(self, grace_s: float) -> None:
        """Ends what `open_unix_sockets` began; calls in flight have so long to end. Idempotent."""
        await asyncio.gather(
            *(lane.close(grace_s) for lane in (self._unix_socket, self._device_thread_socket) if lane is not None)
        )

    async def serve(self, frames: AsyncIterator[Any], context: Any) -> None:
        """Serves one stream of calls, unless it was meant for another model than this replica's."""
        await shake_hands_with_caller(context, self.info())
        await self._frames.serve(frames, context.write)

    async def Release(self, request: common_pb2.ReleaseRequest, context: Any) -> common_pb2.ReleaseResponse:  # noqa: N802
        if len(request.session_ids) > MAX_RELEASED_SESSIONS:
            raise InvalidRequest(
                f"session_ids holds {len(request.session_ids)} ids; the limit is {MAX_RELEASED_SESSIONS}",
                field="session_ids",
            )
        tenant = tenant_of(request.tenant, field="tenant")
        await self._served.release(
            [session_on_replica(tenant, session_id, field="session_ids") for session_id in request.session_ids]
        )
        return common_pb2.ReleaseResponse()

    async def Score(self, request: common_pb2.ScoreRequest, context: Any) -> common_pb2.ScoreResponse:  # noqa: N802
        return codec.encode_score(await self._served.score(codec.decode_score_request(request, self._limits)))

    async def GetEngineInfo(self, request: common_pb2.GetEngineInfoRequest, context: Any) -> common_pb2.EngineInfo:  # noqa: N802
        if self._served.is_stalled:
            # Whoever asks would take an answer for a sign that calls are answered too.
            raise Unavailable("the device of this replica hangs")
        return codec.encode_engine_info(self.info())

    async def answer(self, item: Any) -> Answered:
        """Asks the engine what a request item asks. Raises SpecdecError for the item alone."""
        raise NotImplementedError

    async def _count_answer(self, item: Any, received_s: float) -> Any:
        arrived_s = time.monotonic()
        with self._metrics.call():
            answered = await self.answer(item)
        ended_s = time.monotonic()
        self._metrics.observe_call(
            duration_s=ended_s - arrived_s,
            num_committed_tokens=answered.num_committed_tokens,
            num_cached_tokens=answered.num_cached_tokens,
            num_draft_tokens=answered.num_draft_tokens,
        )
        if answered.stages is not None:
            stages = answered.stages._replace(
                received_s=received_s, decoded_s=answered.decoded_s, answered_s=answered.answered_s, encoded_s=ended_s
            )
            encode_stages(stages, answered.message.stages)
        return answered.message
