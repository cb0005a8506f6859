"""The gRPC servicer of the target service: decode a request, call the engine, encode the answer.

A round goes to `target_service.verifier`. `specdec.rpc.replica_servicer` has the part that both services share. Built
by `__main__`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc

from specdec.contract.engine_api import TargetEngine
from specdec.contract.types import SessionPosition, Verification, VerifyRequest
from specdec.observability.engine_metrics import EngineMetrics
from specdec.rpc import codec, verifications
from specdec.rpc.outgoing import FrameParts, Outgoing
from specdec.rpc.replica_servicer import Answered, ReplicaServicer
from specdec.v1 import target_pb2, target_pb2_grpc


class TargetServicer(ReplicaServicer, target_pb2_grpc.TargetServiceServicer):
    """Servicer of one engine for any number of links. Use from one event loop."""

    def __init__(self, engine: TargetEngine, metrics: EngineMetrics) -> None:
        super().__init__(
            engine,
            metrics,
            items_of=lambda frame: frame.requests,
            request_type=target_pb2.VerifyFrame,
            reply_type=target_pb2.Verification,
            frame_of=_frame_of,
            renewals_of=lambda frame: frame.renewals,
        )
        self._engine = engine

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service on a server that has not started."""
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)

    async def Verify(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # noqa: N802
        await self.serve(request_iterator, context)

    async def answer(self, item: target_pb2.VerifyRequest, outgoing: Outgoing) -> Answered:
        request = codec.decode_verify_request(item, self._limits, model=outgoing.model)
        self.open_turns.note_call(request.position.session_id, request.position.epoch)
        decoded_s = time.monotonic()
        run: _ServedRun | None = None
        if request.run is None:
            verification = await self._engine.verify(request)
        else:
            run = _ServedRun(item.call_id, request, outgoing, self._metrics, decoded_s)
            outgoing.runs[item.call_id] = partial(self._renew, request.position)
            try:
                verification = await self._engine.verify(request, run.note_step)
            finally:
                del outgoing.runs[item.call_id]
        answered_s = time.monotonic()
        return Answered(
            verifications.encode_verification(verification, item.call_id),
            num_committed_tokens=verification.kv_len if run else request.position.committed_len,
            num_cached_tokens=verification.num_cached_tokens,
            num_draft_tokens=len(request.draft_token_ids),
            decoded_s=decoded_s,
            answered_s=answered_s,
            stages=verification.stages,
            began_s=run.answered_s if run else 0.0,
        )

    def _renew(self, position: SessionPosition, until: int, committed_len: int) -> None:
        self.open_turns.note_renewal(position.session_id, position.epoch)
        self._engine.renew(position, until, committed_len)


class _ServedRun:
    """The steps of a run between its call and its last answer."""

    def __init__(
        self, call_id: int, request: VerifyRequest, outgoing: Outgoing, metrics: EngineMetrics, arrived_s: float
    ) -> None:
        self._call_id = call_id
        self._request = request
        self._outgoing = outgoing
        self._metrics = metrics
        self.answered_s = arrived_s
        """Time at which the newest step was answered."""

    def note_step(self, verification: Verification) -> None:
        """Send and count a step. Each counts as a call that began when the step before it was answered."""
        self._outgoing.put_step(self._call_id, verification)
        now_s = time.monotonic()
        self._metrics.observe_call(
            duration_s=now_s - self.answered_s,
            num_committed_tokens=verification.kv_len,
            num_cached_tokens=verification.num_cached_tokens,
            num_draft_tokens=0,
        )
        self.answered_s = now_s


def _frame_of(parts: FrameParts) -> target_pb2.VerificationFrame:
    """Return a frame. Steps that a column cannot hold, such as the first of a run, are verifications that go on."""
    whole: list[target_pb2.Verification] = []
    short: list[tuple[int, Verification]] = []
    for call_id, verification in parts.steps:
        if verification.logit_rows or verification.stages or verification.num_cached_tokens + 1 < verification.kv_len:
            message = verifications.encode_verification(verification, call_id)
            message.goes_on = True
            whole.append(message)
        else:
            short.append((call_id, verification))
    frame = target_pb2.VerificationFrame(verifications=[*whole, *parts.replies])
    if short:
        frame.steps.append(verifications.encode_steps(short))
    return frame
