"""Links: how a coordinator calls one draft or target replica.

A link keeps one bidirectional stream open and multiplexes any number of calls on it: what is asked within one turn of
the event loop travels in one frame, and replies come back in any order; those of a frame are decoded together. A link
dials when first used and again after a break; it does not retry calls, because only the round loop knows what a late
answer is worth.

Not here: choosing replicas, deadlines, retries (the coordinator). Called by the coordinator, and by tests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from specdec.errors import Internal, InvalidRequest, Unavailable
from specdec.rpc import codec, replies, status
from specdec.rpc.framing import join_items, split_items
from specdec.types import EngineInfo, Proposal, ProposeRequest, Verification, VerifyRequest
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")

#: A frame stops taking items at this size, so that one big item never drags the others past the peer's limit.
FRAME_BYTES = 1 << 20

#: Tag and length of an item in its frame.
_FRAME_OVERHEAD_BYTES = 16

_CALL_ID_MODULUS = 1 << 32

_CHANNEL_OPTIONS = (
    # A peer that vanished without a FIN is noticed within 10 s; only a machine stalled for 5 s is taken for one.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted replica is dialled again soon.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 64 << 20),
    # Links to different replicas never share a connection, and a link made after a failure starts afresh.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(slots=True)
class WireCount:
    """What calls cost on the wire, whatever became of them."""

    num_bytes: int = 0
    """Serialised request items sent and reply items received."""


@dataclass(slots=True)
class _Pending:
    request: Any
    item: bytes
    """The request, encoded."""
    wire: WireCount
    answer: asyncio.Future[Any]


def _expire(answer: asyncio.Future[Any]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())


class _Stream:
    """One open bidirectional call and the calls that wait on it. Dies whole; the link then opens another."""

    def __init__(
        self,
        call: Any,
        items_of: Callable[[bytes], Sequence[tuple[Any, int]]],
        decode: Callable[[list[Any], list[Any]], Sequence[Any]],
        address: str,
    ) -> None:
        """
        Args:
            call: takes and gives frames as bytes.
            items_of: the replies of a frame with their sizes in bytes; raises DecodeError.
            decode: the answers that replies of one frame give to their requests.
            address: of the replica.
        """
        self._call = call
        self._items_of = items_of
        self._decode = decode
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, _Pending] = {}
        self._outbox: deque[_Pending] = deque()
        self._wake = asyncio.Event()
        self._next_call_id = 0
        self.closed = False
        self._task = asyncio.create_task(self._run(), name=f"link {address}")

    def next_call_id(self) -> int:
        while True:
            self._next_call_id = (self._next_call_id + 1) % _CALL_ID_MODULUS
            if self._next_call_id not in self._pending:
                return self._next_call_id

    async def ask(self, call_id: int, request: Any, item: bytes, wire: WireCount, deadline_s: float | None) -> Any:
        """Sends one item; returns its decoded reply. `deadline_s` is of the loop's clock; raises TimeoutError at it."""
        pending = _Pending(request, item, wire, self._loop.create_future())
        self._pending[call_id] = pending
        self._outbox.append(pending)
        self._wake.set()
        timer = None if deadline_s is None else self._loop.call_at(deadline_s, _expire, pending.answer)
        try:
            return await pending.answer
        finally:
            if timer is not None:
                timer.cancel()
            # A cancelled call is forgotten: unsent, it never leaves; sent, its reply is dropped on arrival.
            self._pending.pop(call_id, None)

    @property
    def oldest_pending(self) -> object:
        """The call that has waited longest, by identity; None where none waits."""
        return next(iter(self._pending.values()), None)

    def break_off(self, reason: str) -> None:
        """Fails what is pending with Unavailable, at once; the stream is closed."""
        self._task.cancel()
        self._end(reason)

    async def close(self) -> None:
        """Fails what is pending. Idempotent."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._end(f"{self._address}: the link was closed")  # for a task that never ran

    async def _run(self) -> None:
        writer = asyncio.create_task(self._write())
        reason = f"{self._address}: the link was closed"
        try:
            reason = await self._read()
        finally:
            writer.cancel()
            self._end(reason)

    def _end(self, reason: str) -> None:
        self.closed = True
        self._call.cancel()
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(Unavailable(reason))
        self._pending.clear()
        self._outbox.clear()

    async def _read(self) -> str:
        """Hands out replies until the stream ends; returns why it did."""
        try:
            while (frame := await self._call.read()) is not grpc.aio.EOF:
                self._deliver(frame)
        except grpc.aio.AioRpcError as error:
            return status.from_rpc_error(error, peer=self._address).message
        except DecodeError as error:
            return f"{self._address}: the replica sent what is no frame: {error}"
        return f"{self._address}: the replica closed the stream"

    def _deliver(self, frame: bytes) -> None:
        """Decodes the replies of a frame together and tells each caller its own."""
        items: list[Any] = []
        waiting: list[_Pending] = []
        for item, num_bytes in self._items_of(frame):
            pending = self._pending.get(item.call_id)
            if pending is None or pending.answer.done():
                continue
            pending.wire.num_bytes += num_bytes
            if item.HasField("status") and item.status.code:
                pending.answer.set_exception(status.from_item_status(item.status))
            else:
                items.append(item)
                waiting.append(pending)
        answers = self._decode(items, [pending.request for pending in waiting])
        for pending, answer in zip(waiting, answers, strict=True):
            if pending.answer.done():
                continue  # the replica answered it twice
            if isinstance(answer, Internal):
                pending.answer.set_exception(Internal(f"{self._address}: {answer.message}"))
            else:
                pending.answer.set_result(answer)

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while items := self._take():
                    await self._call.write(join_items(items))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader sees the same break and says what it was
        finally:
            self._call.cancel()  # whatever ended the writer ends the stream; a no-op on one that has ended

    def _take(self) -> list[bytes]:
        items: list[bytes] = []
        size = 0
        while self._outbox and (not items or size + len(self._outbox[0].item) <= FRAME_BYTES):
            pending = self._outbox.popleft()
            if not pending.answer.done():
                items.append(pending.item)
                size += len(pending.item)
                pending.wire.num_bytes += len(pending.item)
        return items


class _Link(Generic[RequestT, ReplyT]):
    """What both links share. Use from one event loop; any number of calls at once."""

    def __init__(self, address: str, *, max_message_bytes: int = 4 << 20, call_timeout_s: float = 5.0) -> None:
        """
        Args:
            address: HOST:PORT of the replica. Nothing is dialled yet.
            max_message_bytes: the replica's limit; a larger item is refused here, sparing the others the break.
            call_timeout_s: for `info` and `release`; streamed calls have no deadline of their own.
        """
        self.address = address
        self._max_message_bytes = max_message_bytes
        self._call_timeout_s = call_timeout_s
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._stream: _Stream | None = None
        self._closed = False

    # What a subclass fills in.
    _stub_type: Callable[[grpc.aio.Channel], Any]
    _stream_method: str
    """Full name of the call that frames travel on."""
    _reply_type: type[Message]

    def _replies_of(self, frame: bytes) -> Sequence[Any]:
        """As protobuf reads the frame message."""
        raise NotImplementedError

    def _encode(self, request: RequestT, call_id: int) -> Message:
        raise NotImplementedError

    def _decode(self, messages: list[Any], requests: list[RequestT]) -> Sequence[ReplyT | Internal]:
        """The replies of one frame; a malformed one is its own error."""
        raise NotImplementedError

    async def _ask(self, request: RequestT, wire: WireCount | None, deadline_s: float | None = None) -> ReplyT:
        stream = self._open_stream()
        call_id = stream.next_call_id()
        item = self._encode(request, call_id).SerializeToString()
        if len(item) + _FRAME_OVERHEAD_BYTES > self._max_message_bytes:
            raise InvalidRequest(
                f"{self.address}: a request of {len(item)} bytes; the limit is {self._max_message_bytes}"
            )
        wire = WireCount() if wire is None else wire
        reply: ReplyT = await stream.ask(call_id, request, item, wire, deadline_s)
        return reply

    def _items_of(self, frame: bytes) -> Sequence[tuple[Any, int]]:
        """The replies of a frame and their sizes. Raises DecodeError."""
        items = split_items(frame)
        if items is None:  # with fields that a later version has, or broken
            return [(reply, reply.ByteSize()) for reply in self._replies_of(frame)]
        return [(self._reply_type.FromString(item), len(item)) for item in items]

    def _open_stream(self) -> _Stream:
        if self._stream is None or self._stream.closed:
            # Without serializers: frames are bytes here.
            call: Any = self._dial().stream_stream(self._stream_method)()
            self._stream = _Stream(call, self._items_of, self._decode, self.address)
        return self._stream

    def _dial(self) -> grpc.aio.Channel:
        if self._closed:
            raise Unavailable(f"{self.address}: the link is closed")
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
            self._stub = type(self)._stub_type(self._channel)
        return self._channel

    @property
    def oldest_pending(self) -> object:
        """The streamed call that has waited longest, by identity; None where none waits."""
        return None if self._stream is None else self._stream.oldest_pending

    def break_off(self, reason: str) -> None:
        """Fails every streamed call that is pending with Unavailable, at once; the next one opens another stream."""
        if self._stream is not None:
            self._stream.break_off(reason)

    async def info(self) -> EngineInfo:
        """Asks the replica what it is.

        Raises:
            Unavailable: it cannot be reached, or does not answer in time.
        """
        message = await self._unary("GetEngineInfo", common_pb2.GetEngineInfoRequest())
        return codec.decode_engine_info(message)

    async def release(self, session_ids: Sequence[str]) -> None:
        """Frees sessions' KV on the replica. Idempotent.

        Raises:
            Unavailable: it cannot be reached, or does not answer in time.
        """
        await self._unary("Release", common_pb2.ReleaseRequest(session_ids=session_ids))

    async def _unary(self, method: str, request: Any) -> Any:
        self._dial()
        try:
            return await getattr(self._stub, method)(request, timeout=self._call_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise status.from_rpc_error(error, peer=self.address) from error

    async def close(self) -> None:
        """Fails what is pending with Unavailable and hangs up. Idempotent; the link cannot be used afterwards."""
        self._closed = True
        if self._stream is not None:
            await self._stream.close()
        if self._channel is not None:
            await self._channel.close()


class DraftLink(_Link[ProposeRequest, Proposal]):
    """The link to one draft replica."""

    _stub_type = draft_pb2_grpc.DraftServiceStub
    _stream_method = "/specdec.v1.DraftService/Propose"
    _reply_type = draft_pb2.Proposal

    async def propose(
        self, request: ProposeRequest, wire: WireCount | None = None, *, deadline_s: float | None = None
    ) -> Proposal:
        """Asks for draft tokens. Idempotent by (session, epoch, round) and digest, so it may be repeated.

        Cancelling forgets the call and disturbs no other; the replica may still finish it. What was sent and received
        is added to `wire` however the call ends. At `deadline_s` of the event loop's clock it is given up.

        Raises:
            TimeoutError: the deadline has passed.
            Unavailable: the replica cannot be reached or broke off; at once, for every call pending on it.
            Internal: its answer does not fit the request.
            SpecdecError: what the replica answered (KvMiss, StaleEpoch, ResourceExhausted, InvalidRequest, ...).
        """
        return await self._ask(request, wire, deadline_s)

    def _replies_of(self, frame: bytes) -> Sequence[draft_pb2.Proposal]:
        return draft_pb2.ProposalFrame.FromString(frame).proposals

    def _encode(self, request: ProposeRequest, call_id: int) -> draft_pb2.ProposeRequest:
        return codec.encode_propose_request(request, call_id)

    def _decode(
        self, messages: list[draft_pb2.Proposal], requests: list[ProposeRequest]
    ) -> Sequence[Proposal | Internal]:
        return replies.decode_proposals(messages, requests)


class TargetLink(_Link[VerifyRequest, Verification]):
    """The link to one target replica."""

    _stub_type = target_pb2_grpc.TargetServiceStub
    _stream_method = "/specdec.v1.TargetService/Verify"
    _reply_type = target_pb2.Verification

    async def verify(self, request: VerifyRequest, wire: WireCount | None = None) -> Verification:
        """Asks for p at the draft's positions. Idempotent, counted, cancelled and failing as `DraftLink.propose`."""
        return await self._ask(request, wire)

    def _replies_of(self, frame: bytes) -> Sequence[target_pb2.Verification]:
        return target_pb2.VerificationFrame.FromString(frame).verifications

    def _encode(self, request: VerifyRequest, call_id: int) -> target_pb2.VerifyRequest:
        return codec.encode_verify_request(request, call_id)

    def _decode(
        self, messages: list[target_pb2.Verification], requests: list[VerifyRequest]
    ) -> Sequence[Verification | Internal]:
        return replies.decode_verifications(messages, requests)
