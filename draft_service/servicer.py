"""The gRPC servicer of the draft service: decode a request, call the engine, encode the answer.

A round goes to `draft_service.proposer`. `specdec.rpc.replica_servicer` has the part that both services share. Built by
`__main__`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from specdec.contract.engine_api import DraftEngine
from specdec.observability.engine_metrics import EngineMetrics
from specdec.rpc import codec, proposals
from specdec.rpc.outgoing import Outgoing
from specdec.rpc.replica_servicer import Answered, ReplicaServicer
from specdec.v1 import draft_pb2, draft_pb2_grpc


class DraftServicer(ReplicaServicer, draft_pb2_grpc.DraftServiceServicer):
    """Servicer of one engine for any number of links. Use from one event loop."""

    def __init__(self, engine: DraftEngine, metrics: EngineMetrics) -> None:
        super().__init__(
            engine,
            metrics,
            items_of=lambda frame: frame.requests,
            request_type=draft_pb2.ProposeFrame,
            reply_type=draft_pb2.Proposal,
            frame_of=lambda parts: draft_pb2.ProposalFrame(proposals=parts.replies),
        )
        self._engine = engine

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service on a server that has not started."""
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)

    async def Propose(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # noqa: N802
        await self.serve(request_iterator, context)

    async def answer(self, item: draft_pb2.ProposeRequest, outgoing: Outgoing) -> Answered:
        request = codec.decode_propose_request(item, self._limits)
        decoded_s = time.monotonic()
        proposal = await self._engine.propose(request)
        answered_s = time.monotonic()
        return Answered(
            proposals.encode_proposal(proposal, item.call_id),
            num_committed_tokens=request.position.committed_len,
            num_cached_tokens=proposal.num_cached_tokens,
            num_draft_tokens=len(proposal.draft_token_ids),
            decoded_s=decoded_s,
            answered_s=answered_s,
            stages=proposal.stages,
        )
