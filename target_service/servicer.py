"""The gRPC servicer of the target service: decode a request, call the engine, encode the answer.

A round goes to `target_service.verifier`. `specdec.rpc.replica_servicer` has the part that both services share. Built
by `__main__`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from specdec.contract.engine_api import TargetEngine
from specdec.observability.engine_metrics import EngineMetrics
from specdec.rpc import codec, verifications
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
            frame_of=lambda replies: target_pb2.VerificationFrame(verifications=replies),
        )
        self._engine = engine

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service on a server that has not started."""
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)

    async def Verify(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # noqa: N802
        await self.serve(request_iterator, context)

    async def answer(self, item: target_pb2.VerifyRequest) -> Answered:
        request = codec.decode_verify_request(item, self._limits)
        self.open_turns.note_call(request.position.session_id, request.position.epoch)
        decoded_s = time.monotonic()
        verification = await self._engine.verify(request)
        answered_s = time.monotonic()
        return Answered(
            verifications.encode_verification(verification, item.call_id),
            num_committed_tokens=request.position.committed_len,
            num_cached_tokens=verification.num_cached_tokens,
            num_draft_tokens=len(request.draft_token_ids),
            decoded_s=decoded_s,
            answered_s=answered_s,
            stages=verification.stages,
        )
