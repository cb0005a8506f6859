"""Joining and splitting of frames as bytes, compared with protobuf's own encoding of the same messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.contract.errors import Unavailable
from specdec.contract.types import DrawRule, ProposeRequest
from specdec.rpc.client import DraftLink
from specdec.rpc.framing import MAX_FRAME_ITEMS, join_items, split_items
from specdec.v1 import draft_pb2
from tests.support.arithmetic_engines import make_round

#: Lengths around those at which the length prefix needs another byte.
SIZES = st.one_of(st.integers(0, 300), st.integers(16_380, 16_390))
REPLIES = st.lists(st.builds(lambda size, call_id: draft_pb2.Proposal(call_id=call_id, weights=b"w" * size), SIZES,
                             st.integers(0, 2**32 - 1)), max_size=5)  # fmt: skip


@given(REPLIES)
def test_a_frame_is_the_bytes_protobuf_makes_of_the_same_items(messages: list[draft_pb2.Proposal]) -> None:
    items = [message.SerializeToString() for message in messages]
    frame = draft_pb2.ProposalFrame(proposals=messages).SerializeToString()
    assert join_items(items) == frame
    assert split_items(frame) == items


@given(REPLIES.filter(bool), st.data())
def test_a_frame_cut_short_is_left_to_protobuf(messages: list[draft_pb2.Proposal], data: Any) -> None:
    frame = draft_pb2.ProposalFrame(proposals=messages).SerializeToString()
    ends = {len(draft_pb2.ProposalFrame(proposals=messages[:count]).SerializeToString()) for count in range(6)}
    cut = data.draw(st.integers(1, len(frame)).filter(lambda place: place not in ends))
    assert split_items(frame[:cut]) is None


@pytest.mark.parametrize("extra", [b"\x10\x07", b"\x1a\x02xy"])
async def test_replies_are_read_out_of_frames_with_fields_of_a_later_version(extra: bytes) -> None:
    async def answer(frames: Any) -> Any:
        async for frame in frames:
            for request in draft_pb2.ProposeFrame.FromString(frame).requests:
                reply = draft_pb2.Proposal(call_id=request.call_id, draft_token_ids=[7], lost_mass=[0.0], kv_len=3)
                yield draft_pb2.ProposalFrame(proposals=[reply]).SerializeToString() + extra

    proposal = await _propose_to(answer)
    assert proposal.draft_token_ids.tolist() == [7]


async def test_a_replica_that_sends_bytes_that_are_not_a_frame_is_disconnected_and_named() -> None:
    async def answer(frames: Any) -> Any:
        async for _ in frames:
            yield b"\x0a\xff"

    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:\d+: the replica sent bytes that are not a frame"):
        await _propose_to(answer)


async def test_a_replica_that_answers_with_millions_of_items_is_disconnected_before_they_are_read() -> None:
    for num_items in (2_000_000, MAX_FRAME_ITEMS + 1):

        async def answer(frames: Any, num_items: int = num_items) -> Any:
            async for _ in frames:
                yield b"\x0a\x00" * num_items

        with pytest.raises(Unavailable, match="the replica sent bytes that are not a frame"):
            await _propose_to(answer)


def reply_to(frame: bytes, *, call_id: int) -> bytes:
    """Answer the only item of a frame with a draft of one token, for the call id that follows by `call_id`."""
    (request,) = draft_pb2.ProposeFrame.FromString(frame).requests
    reply = draft_pb2.Proposal(call_id=request.call_id + call_id, draft_token_ids=[7], lost_mass=[0.0], kv_len=3)
    return draft_pb2.ProposalFrame(proposals=[reply]).SerializeToString()


async def test_a_replica_that_answers_an_unknown_call_is_disconnected_at_once() -> None:
    async def answer(frames: Any) -> Any:
        async for frame in frames:
            yield reply_to(frame, call_id=1)

    with pytest.raises(
        Unavailable, match=r"127\.0\.0\.1:\d+: the replica answered call 2, which is not waiting for an answer"
    ):
        await _propose_to(answer)


async def test_an_answer_to_a_cancelled_call_is_dropped_and_a_second_one_ends_the_stream() -> None:
    late: list[bytes] = []
    has_asked = asyncio.Event()

    async def answer(frames: Any) -> Any:
        async for frame in frames:
            late.append(frame)
            has_asked.set()
            if len(late) == 2:
                yield reply_to(late[0], call_id=0)
            if len(late) == 3:
                yield reply_to(late[0], call_id=0)
                continue
            if len(late) > 1:
                yield reply_to(frame, call_id=0)

    async with _link_to(answer) as link:
        request = ProposeRequest(make_round(draw_rule=DrawRule.COUPLED), 1)
        given_up = asyncio.create_task(link.propose(request))
        await has_asked.wait()
        given_up.cancel()
        await asyncio.wait([given_up])
        assert (await link.propose(request)).draft_token_ids.tolist() == [7]
        with pytest.raises(Unavailable, match="answered call 1, which is not waiting for an answer"):
            await link.propose(request)


async def test_a_replica_with_a_malformed_description_is_unavailable() -> None:
    async def answer(frames: Any) -> Any:
        async for _ in frames:
            yield b""

    async with _link_to(answer, describe=b"\x0a\xff") as link:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:\d+: the replica sent an invalid answer to GetEngineInfo"):
            await link.info()


async def _propose_to(answer: Any) -> Any:
    """Yield a link to a replica whose stream is `answer`, from frames of bytes to frames of bytes."""
    async with _link_to(answer) as link:
        request = ProposeRequest(make_round(draw_rule=DrawRule.COUPLED), 1)
        return await asyncio.wait_for(link.propose(request), 10)


@asynccontextmanager
async def _link_to(answer: Any, describe: bytes = b"") -> AsyncIterator[DraftLink]:
    async def serve(frames: Any, context: Any) -> Any:
        async for frame in answer(frames):
            yield frame

    async def get_engine_info(request: bytes, context: Any) -> bytes:
        return describe

    server = grpc.aio.server()
    handlers: Any = {
        "Propose": grpc.stream_stream_rpc_method_handler(serve),
        "GetEngineInfo": grpc.unary_unary_rpc_method_handler(get_engine_info),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("specdec.v1.DraftService", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = DraftLink(f"127.0.0.1:{port}")
    try:
        yield link
    finally:
        await link.close()
        await server.stop(0)
