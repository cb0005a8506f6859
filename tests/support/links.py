"""For tests of links: a service that never answers, sizes of frames, and single replies as if each were a frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import pytest

from specdec.contract.errors import Internal
from specdec.contract.types import Proposal, ProposeRequest, Verification, VerifyRequest
from specdec.rpc import proposals, replica_stream, verifications
from specdec.v1 import draft_pb2, target_pb2


class _Handler(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(_wait)


async def _wait(request: bytes, context: Any) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def silent_service() -> AsyncIterator[str]:
    """Run a service that accepts every call and answers none, as a hung process does; yield its address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def recorded_frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the number of items of every later frame is added, in order."""
    frames: list[int] = []
    join_items = replica_stream.join_items

    def recorded(items: list[bytes]) -> bytes:
        frames.append(len(items))
        return join_items(items)

    monkeypatch.setattr(replica_stream, "join_items", recorded)
    return frames


AnswerT = TypeVar("AnswerT")


def decode_proposal(message: draft_pb2.Proposal, request: ProposeRequest) -> Proposal:
    """Return the decoded reply. Raises Internal if the reply is malformed."""
    return _only(proposals.decode_proposals([message], [request]))


def decode_verification(message: target_pb2.Verification, request: VerifyRequest) -> Verification:
    """Return the decoded reply. Raises Internal if the reply is malformed."""
    return _only(verifications.decode_verifications([message], [request]))


def _only(answers: Sequence[AnswerT | Internal]) -> AnswerT:
    (answer,) = answers
    if isinstance(answer, Internal):
        raise answer
    return answer
