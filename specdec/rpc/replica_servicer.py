"""The common part of the draft and the target servicer: streams, scores, release, identity, drain and metrics.

A round's item comes here from a frame (`specdec.rpc.frames`), goes through the service's own `servicer` into its engine
(`specdec.contract.engine_api`), a proposer or a verifier, and the reply returns the same way.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message

from specdec.contract.engine_api import EndedTurn, Engine, EngineInfo
from specdec.contract.errors import InvalidRequest, Unavailable
from specdec.contract.tenant import session_on_replica
from specdec.contract.types import Stages
from specdec.contract.version import build_of
from specdec.observability.engine_metrics import EngineMetrics
from specdec.rpc import codec
from specdec.rpc.frames import FrameServer
from specdec.rpc.handshake import shake_hands_with_caller
from specdec.rpc.open_turns import CALLED_WITHIN_S, OpenTurns
from specdec.rpc.outgoing import FrameParts, Outgoing
from specdec.rpc.rounds import tenant_of
from specdec.rpc.stages import encode_stages
from specdec.rpc.unix_socket_server import UnixSocketServer
from specdec.v1 import common_pb2

#: Limit of sessions in one Release call.
MAX_RELEASED_SESSIONS = 4096


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply item, with the numbers that the metrics count its call by."""

    message: Any
    num_committed_tokens: int
    num_cached_tokens: int
    num_draft_tokens: int
    decoded_s: float
    """Time at which the request had been decoded and checked, by `time.monotonic`."""
    answered_s: float
    """Time at which the engine had answered."""
    stages: Stages | None
    """The engine's times by the same clock; None if the request did not ask for them."""
    began_s: float = 0.0
    """Time at which the last step of a run became possible, when the step before it was answered; 0: at the arrival."""


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
        frame_of: Callable[[FrameParts], Any],
        renewals_of: Callable[[Any], Sequence[Any]] = lambda frame: (),
    ) -> None:
        """
        Args:
            engine: answers the calls.
            metrics: counts them.
            items_of: as for `FrameServer`, like `reply_type` and `frame_of`.
            request_type: message type of a frame of requests.
            reply_type: see above.
            frame_of: see above.
            renewals_of: see above.
        """
        self._served = engine
        self._metrics = metrics
        self._limits = engine.info()
        self._incarnation = secrets.token_hex(8)
        self._frames = FrameServer(
            items_of=items_of,
            answer=self._count_answer,
            reply_type=reply_type,
            frame_of=frame_of,
            renewals_of=renewals_of,
        )
        self._request_type = request_type
        self._build = build_of(f"{self._limits.role}_service")
        self._is_leaving = False
        self._is_set_draining = False
        self.on_leaving: Callable[[bool], Awaitable[None]] | None = None
        """Awaited with whether the replica takes no new sessions from now on, when a call has decided it."""
        self.open_turns = OpenTurns()
        """Turns whose calls were answered here, where the service notes them."""
        self._unix_socket: UnixSocketServer | None = None

    def info(self) -> EngineInfo:
        """Return the replica's current description; it says draining after `drain`."""
        engine_info = self._served.info()
        draining = engine_info.draining or self._is_leaving or self._is_set_draining or self._frames.draining
        return replace(
            engine_info,
            draining=draining,
            incarnation=self._incarnation,
            build=self._build,
            unix_socket="" if self._unix_socket is None else self._unix_socket.name,
        )

    def leave(self) -> None:
        """Say draining, so that no further session comes here, but answer all calls until `drain`."""
        self._is_leaving = True

    def drain(self) -> None:
        """Refuse new calls with DRAINING; streams end once their calls in flight are answered."""
        self._frames.drain()

    async def open_unix_socket(self, max_frame_bytes: int) -> None:
        """Serve frames over a Unix socket as well; `info` names it from now on."""
        self._unix_socket = UnixSocketServer(self._frames, self._request_type, self.info, max_frame_bytes)
        await self._unix_socket.start()

    async def close_unix_socket(self, grace_s: float) -> None:
        """Close the Unix socket, if there is one; calls in flight have `grace_s` seconds to end. Idempotent."""
        if self._unix_socket is not None:
            await self._unix_socket.close(grace_s)

    async def serve(self, frames: AsyncIterator[Any], context: Any) -> None:
        """Serve one gRPC stream of frames. Raises Unavailable if the stream is meant for another model."""
        model = await shake_hands_with_caller(context, self.info())
        await self._frames.serve(frames, context.write, model)

    async def Release(self, request: common_pb2.ReleaseRequest, context: Any) -> common_pb2.ReleaseResponse:  # noqa: N802
        if len(request.session_ids) > MAX_RELEASED_SESSIONS:
            raise InvalidRequest(
                f"session_ids holds {len(request.session_ids)} ids; the limit is {MAX_RELEASED_SESSIONS}",
                field="session_ids",
            )
        if request.epochs and len(request.epochs) != len(request.session_ids):
            raise InvalidRequest(
                f"epochs holds {len(request.epochs)} numbers for {len(request.session_ids)} sessions", field="epochs"
            )
        if len(request.resumable_ids) > len(request.session_ids):
            raise InvalidRequest(
                f"resumable_ids holds {len(request.resumable_ids)} ids for {len(request.session_ids)} sessions",
                field="resumable_ids",
            )
        tenant = tenant_of(request.tenant, field="tenant")
        session_ids = [
            session_on_replica(tenant, session_id, field="session_ids") for session_id in request.session_ids
        ]
        if request.epochs:
            epochs = dict(zip(session_ids, request.epochs, strict=True))
            resumable = {session_on_replica(tenant, each, field="resumable_ids") for each in request.resumable_ids}
            self.open_turns.end(epochs, resumable)
            await self._served.end_turns([EndedTurn(*turn) for turn in epochs.items()])
        else:
            self.open_turns.forget(session_ids)
            await self._served.release(session_ids)
        return common_pb2.ReleaseResponse()

    async def Score(self, request: common_pb2.ScoreRequest, context: Any) -> common_pb2.ScoreResponse:  # noqa: N802
        return codec.encode_score(await self._served.score(codec.decode_score_request(request, self._limits)))

    async def GetEngineInfo(self, request: common_pb2.GetEngineInfoRequest, context: Any) -> common_pb2.EngineInfo:  # noqa: N802
        if self._served.is_stalled:
            # A caller would take an answer as a sign that calls are answered too.
            raise Unavailable("the device of this replica hangs")
        return codec.encode_engine_info(self.info())

    async def SetDraining(  # noqa: N802
        self, request: common_pb2.SetDrainingRequest, context: Any
    ) -> common_pb2.SetDrainingResponse:
        if request.draining != self._is_set_draining:
            self._is_set_draining = request.draining
            if self.on_leaving is not None:
                await self.on_leaving(request.draining)
        engine_info = self.info()
        return common_pb2.SetDrainingResponse(
            num_streams=max(engine_info.num_running, self.open_turns.num_running(CALLED_WITHIN_S)),
            num_sessions=engine_info.num_sessions,
        )

    async def answer(self, item: Any, outgoing: Outgoing) -> Answered:
        """Let the engine answer a request item; a run puts its steps into `outgoing`.

        Raises SpecdecError for this item alone.
        """
        raise NotImplementedError

    async def _count_answer(self, item: Any, received_s: float, outgoing: Outgoing) -> Any:
        arrived_s = time.monotonic()
        try:
            answered = await self.answer(item, outgoing)
        except Exception as error:
            self._metrics.observe_failure(error)
            raise
        ended_s = time.monotonic()
        self._metrics.observe_call(
            duration_s=ended_s - (answered.began_s or arrived_s),
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
