"""The target service's gRPC face: protobuf in, engine call, protobuf out.

Not here: verifying (`verifier`), streams and error statuses (`specdec.rpc`). Built by `__main__`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc

from specdec.engine.base import TargetEngine
from specdec.observability.metrics import EngineMetrics
from specdec.rpc import codec
from specdec.rpc.frames import FrameServer
from specdec.types import EngineInfo
from specdec.v1 import common_pb2, target_pb2, target_pb2_grpc


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Serves one engine to any number of links. Use from one event loop."""

    def __init__(self, engine: TargetEngine, metrics: EngineMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._limits = engine.info()
        self._frames = FrameServer(
            items_of=lambda frame: frame.requests,
            answer=self._answer,
            reply_type=target_pb2.Verification,
            frame_of=lambda replies: target_pb2.VerificationFrame(verifications=replies),
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service on a server that has not started."""
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)

    def info(self) -> EngineInfo:
        """What the replica is now; draining from `drain` on."""
        engine_info = self._engine.info()
        return replace(engine_info, draining=engine_info.draining or self._frames.draining)

    def drain(self) -> None:
        """Refuses new calls with DRAINING; streams end once what is in flight is answered."""
        self._frames.drain()

    async def Verify(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # noqa: N802
        await self._frames.serve(request_iterator, context.write)

    async def Release(self, request: common_pb2.ReleaseRequest, context: Any) -> common_pb2.ReleaseResponse:  # noqa: N802
        await self._engine.release(list(request.session_ids))
        return common_pb2.ReleaseResponse()

    async def GetEngineInfo(self, request: common_pb2.GetEngineInfoRequest, context: Any) -> common_pb2.EngineInfo:  # noqa: N802
        return codec.encode_engine_info(self.info())

    async def _answer(self, item: target_pb2.VerifyRequest) -> target_pb2.Verification:
        arrived_s = time.monotonic()
        with self._metrics.call():
            request = codec.decode_verify_request(item, self._limits)
            verification = await self._engine.verify(request)
        self._metrics.observe_call(
            duration_s=time.monotonic() - arrived_s,
            num_committed_tokens=request.round.committed_len,
            num_cached_tokens=verification.num_cached_tokens,
            num_draft_tokens=len(request.draft_token_ids),
        )
        return codec.encode_verification(verification, item.call_id)
