"""The draft service's gRPC face: protobuf in, engine call, protobuf out.

Not here: drafting (`proposer`), streams and error statuses (`specdec.rpc`). Built by `__main__`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc

from specdec.engine.base import DraftEngine
from specdec.observability.metrics import EngineMetrics
from specdec.rpc import codec
from specdec.rpc.frames import FrameServer
from specdec.types import EngineInfo
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves one engine to any number of links. Use from one event loop."""

    def __init__(self, engine: DraftEngine, metrics: EngineMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._limits = engine.info()
        self._frames = FrameServer(
            items_of=lambda frame: frame.requests,
            answer=self._answer,
            reply_type=draft_pb2.Proposal,
            frame_of=lambda replies: draft_pb2.ProposalFrame(proposals=replies),
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service on a server that has not started."""
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)

    def info(self) -> EngineInfo:
        """What the replica is now; draining from `drain` on."""
        engine_info = self._engine.info()
        return replace(engine_info, draining=engine_info.draining or self._frames.draining)

    def drain(self) -> None:
        """Refuses new calls with DRAINING; streams end once what is in flight is answered."""
        self._frames.drain()

    async def Propose(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # noqa: N802
        await self._frames.serve(request_iterator, context.write)

    async def Release(self, request: common_pb2.ReleaseRequest, context: Any) -> common_pb2.ReleaseResponse:  # noqa: N802
        await self._engine.release(list(request.session_ids))
        return common_pb2.ReleaseResponse()

    async def GetEngineInfo(self, request: common_pb2.GetEngineInfoRequest, context: Any) -> common_pb2.EngineInfo:  # noqa: N802
        return codec.encode_engine_info(self.info())

    async def _answer(self, item: draft_pb2.ProposeRequest) -> draft_pb2.Proposal:
        arrived_s = time.monotonic()
        with self._metrics.call():
            request = codec.decode_propose_request(item, self._limits)
            proposal = await self._engine.propose(request)
        self._metrics.observe_call(
            duration_s=time.monotonic() - arrived_s,
            num_committed_tokens=request.round.committed_len,
            num_cached_tokens=proposal.num_cached_tokens,
            num_draft_tokens=len(proposal.draft_token_ids),
        )
        return codec.encode_proposal(proposal, item.call_id)
