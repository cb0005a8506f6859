"""Links: how a coordinator calls one draft or target replica.

A link keeps one bidirectional stream open and multiplexes any number of calls on it: what is asked within one turn of
the event loop travels in one frame, and replies come back in any order; those of a frame are decoded together. A link
dials when first used and again after a break; it does not retry calls, because only the round loop knows what a late
answer is worth. A stream is one model's (`identity`): a call that is meant for a model is never answered by another,
whatever process listens at the address by then.

Not here: choosing replicas, deadlines, retries (the coordinator). Called by the coordinator, and by tests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from specdec.errors import Internal, InvalidRequest, Unavailable
from specdec.rpc import codec, replies, status
from specdec.rpc.bounds import check_num_fields
from specdec.rpc.calls import OpenCalls, PendingCall, StrayAnswer, WireCount
from specdec.rpc.framing import MAX_FRAME_ITEMS, join_items, split_items
from specdec.rpc.identity import check_answering, meant_for
from specdec.types import EngineInfo, Proposal, ProposeRequest, Verification, VerifyRequest
from specdec.v1 import common_pb2, draft_pb2, target_pb2

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")

#: A frame stops taking items at this size, so that one big item never drags the others past the peer's limit.
FRAME_BYTES = 1 << 20

#: Tag and length of an item in its frame.
_FRAME_OVERHEAD_BYTES = 16

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


def _check_num_items(count: int) -> None:
    if count > MAX_FRAME_ITEMS:
        raise DecodeError(f"{count} items; the limit is {MAX_FRAME_ITEMS}")


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
        meet: Callable[[Any], None],
    ) -> None:
        """
        Args:
            call: takes and gives frames as bytes.
            items_of: the replies of a frame with their sizes in bytes; raises DecodeError.
            decode: the answers that replies of one frame give to their requests.
            address: of the replica.
            meet: told the metadata of who answers, before any of its answers is; raises Unavailable to take none.
        """
        self._call = call
        self._items_of = items_of
        self._decode = decode
        self._address = address
        self._meet = meet
        self._loop = asyncio.get_running_loop()
        self._calls = OpenCalls()
        self._outbox: deque[PendingCall] = deque()
        self._wake = asyncio.Event()
        self.closed = False
        self._task = asyncio.create_task(self._run(), name=f"link {address}")

    def next_call_id(self) -> int:
        return self._calls.next_id()

    async def ask(self, call_id: int, request: Any, item: bytes, wire: WireCount, deadline_s: float | None) -> Any:
        """Sends one item; returns its decoded reply. `deadline_s` is of the loop's clock; raises TimeoutError at it."""
        pending = PendingCall(request, item, wire, self._loop.create_future())
        self._calls.add(call_id, pending)
        self._outbox.append(pending)
        self._wake.set()
        timer = None if deadline_s is None else self._loop.call_at(deadline_s, _expire, pending.answer)
        try:
            return await pending.answer
        finally:
            if timer is not None:
                timer.cancel()
            self._calls.forget(call_id)
            if self._calls.owes_too_many:
                self._end(f"{self._address}: the replica leaves calls unanswered")

    @property
    def oldest_pending(self) -> object:
        """The call that has waited longest, by identity; None where none waits."""
        return self._calls.oldest

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
        self._calls.fail_all(reason)
        self._outbox.clear()

    async def _read(self) -> str:
        """Hands out replies until the stream ends; returns why it did."""
        has_met = False
        try:
            while (frame := await self._call.read()) is not grpc.aio.EOF:
                if not has_met:  # a call that fails before its first frame has better news than its metadata
                    self._meet(await self._call.initial_metadata())
                    has_met = True
                self._deliver(frame)
        except grpc.aio.AioRpcError as error:
            return status.from_rpc_error(error, peer=self._address).message
        except DecodeError as error:
            return f"{self._address}: the replica sent what is no frame: {error}"
        except StrayAnswer as error:
            return f"{self._address}: the replica {error}"
        except Unavailable as error:
            return f"{self._address}: {error.message}"
        return f"{self._address}: the replica closed the stream"

    def _deliver(self, frame: bytes) -> None:
        """Decodes the replies of a frame together and tells each caller its own.

        Raises:
            StrayAnswer: once they are told. Whoever it was meant for would wait in vain, call after call.
        """
        items: list[Any] = []
        waiting: list[PendingCall] = []
        stray: StrayAnswer | None = None
        for item, num_bytes in self._items_of(frame):
            try:
                pending = self._calls.take(item.call_id)
            except StrayAnswer as error:
                stray = error
                continue
            if pending is None:
                continue
            pending.wire.num_bytes += num_bytes
            if item.HasField("status") and item.status.code:
                pending.answer.set_exception(status.from_item_status(item.status))
            else:
                items.append(item)
                waiting.append(pending)
        answers = self._decode(items, [pending.request for pending in waiting])
        for pending, answer in zip(waiting, answers, strict=True):
            if isinstance(answer, Internal):
                pending.answer.set_exception(Internal(f"{self._address}: {answer.message}"))
            else:
                pending.answer.set_result(answer)
        if stray is not None:
            raise stray

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
        while (
            self._outbox
            and len(items) < MAX_FRAME_ITEMS
            and (not items or size + len(self._outbox[0].item) <= FRAME_BYTES)
        ):
            pending = self._outbox.popleft()
            if not pending.answer.done():
                pending.is_sent = True
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
        self._streams: dict[str, _Stream] = {}
        """By the model they are meant for."""
        self._closed = False
        self.on_meeting: Callable[[str], None] = lambda incarnation: None
        """Told, once a stream, the incarnation of the process that answers it."""
        self.heard_at = 0.0
        """When the replica last answered a streamed call, also one that nobody waited for any more: by the event
        loop's clock, 0 before the first."""

    # What a subclass fills in.
    _stream_method: str
    """Full name of the call that frames travel on."""
    _reply_type: type[Message]
    _frame_type: type[Message]
    """Of replies."""

    def _replies_of(self, frame: bytes) -> Sequence[Any]:
        """As protobuf reads the frame message."""
        raise NotImplementedError

    def _encode(self, request: RequestT, call_id: int) -> Message:
        raise NotImplementedError

    def _decode(self, messages: list[Any], requests: list[RequestT]) -> Sequence[ReplyT | Internal]:
        """The replies of one frame; a malformed one is its own error."""
        raise NotImplementedError

    async def _ask(
        self, request: RequestT, wire: WireCount | None, *, model: str, deadline_s: float | None = None
    ) -> ReplyT:
        stream = self._open_stream(model)
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
        self.heard_at = asyncio.get_running_loop().time()
        check_num_fields(frame, self._frame_type)
        items = split_items(frame)
        if items is None:  # with fields that a later version has, or broken
            replies_ = self._replies_of(frame)
            _check_num_items(len(replies_))
            return [(reply, reply.ByteSize()) for reply in replies_]
        _check_num_items(len(items))
        return [(self._reply_type.FromString(item), len(item)) for item in items]

    def _open_stream(self, model: str) -> _Stream:
        stream = self._streams.get(model)
        if stream is None or stream.closed:
            self._streams = {meant: other for meant, other in self._streams.items() if not other.closed}
            # Without serializers: frames are bytes here.
            call: Any = self._dial().stream_stream(self._stream_method)(metadata=meant_for(model))
            meet = partial(self._meet, model)
            stream = self._streams[model] = _Stream(call, self._items_of, self._decode, self.address, meet)
        return stream

    def _meet(self, model: str, metadata: Any) -> None:
        self.on_meeting(check_answering(metadata, model))

    def _dial(self) -> grpc.aio.Channel:
        if self._closed:
            raise Unavailable(f"{self.address}: the link is closed")
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        return self._channel

    @property
    def oldest_pending(self) -> object:
        """The streamed call that has waited longest, by identity; None where none waits."""
        waiting = (stream.oldest_pending for stream in self._streams.values())
        return next((call for call in waiting if call is not None), None)

    def break_off(self, reason: str) -> None:
        """Fails every streamed call that is pending with Unavailable, at once; the next one opens another stream."""
        for stream in self._streams.values():
            stream.break_off(reason)

    async def info(self) -> EngineInfo:
        """Asks the replica what it is.

        Raises:
            Unavailable: it cannot be reached, does not answer in time, or answers what is no description.
        """
        message = await self._unary("GetEngineInfo", common_pb2.GetEngineInfoRequest(), common_pb2.EngineInfo)
        if len(message.eos_token_ids) > message.vocabulary_size:
            raise Unavailable(f"{self.address}: the replica names more EOS tokens than its vocabulary has")
        return codec.decode_engine_info(message)

    async def release(self, session_ids: Sequence[str]) -> None:
        """Frees sessions' KV on the replica. Idempotent.

        Raises:
            Unavailable: it cannot be reached, or does not answer in time.
        """
        request = common_pb2.ReleaseRequest(session_ids=session_ids)
        await self._unary("Release", request, common_pb2.ReleaseResponse)

    async def _unary(self, method: str, request: Message, answer_type: type[Message]) -> Any:
        service = self._stream_method.rpartition("/")[0]
        # Without serializers: gRPC logs a traceback of what it cannot read, and answers None.
        call: Any = self._dial().unary_unary(f"{service}/{method}")
        try:
            answer = await call(request.SerializeToString(), timeout=self._call_timeout_s)
            check_num_fields(answer, answer_type)
            return answer_type.FromString(answer)
        except asyncio.CancelledError:
            # gRPC cancels what awaits a call on a channel that is closed, as if the caller had been cancelled.
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise Unavailable(f"{self.address}: the link was closed") from None
        except grpc.aio.AioRpcError as error:
            raise status.from_rpc_error(error, peer=self.address) from error
        except DecodeError as error:
            raise Unavailable(
                f"{self.address}: the replica answered {method} with what is no answer: {error}"
            ) from error

    async def close(self) -> None:
        """Fails what is pending with Unavailable and hangs up. Idempotent; the link cannot be used afterwards."""
        self._closed = True
        for stream in self._streams.values():
            await stream.close()
        if self._channel is not None:
            await self._channel.close()


class DraftLink(_Link[ProposeRequest, Proposal]):
    """The link to one draft replica."""

    _stream_method = "/specdec.v1.DraftService/Propose"
    _reply_type = draft_pb2.Proposal
    _frame_type = draft_pb2.ProposalFrame

    async def propose(
        self,
        request: ProposeRequest,
        wire: WireCount | None = None,
        *,
        model: str = "",
        deadline_s: float | None = None,
    ) -> Proposal:
        """Asks for draft tokens. Idempotent by (session, epoch, round) and digest, so it may be repeated.

        Cancelling forgets the call and disturbs no other; the replica may still finish it. What was sent and received
        is added to `wire` however the call ends. At `deadline_s` of the event loop's clock it is given up. `model` is
        the fingerprint of the only model that may answer; "" lets any.

        Raises:
            TimeoutError: the deadline has passed.
            Unavailable: the replica cannot be reached, broke off or serves another model; at once, for every call
                pending on it.
            Internal: its answer does not fit the request.
            SpecdecError: what the replica answered (KvMiss, StaleEpoch, ResourceExhausted, InvalidRequest, ...).
        """
        return await self._ask(request, wire, model=model, deadline_s=deadline_s)

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

    _stream_method = "/specdec.v1.TargetService/Verify"
    _reply_type = target_pb2.Verification
    _frame_type = target_pb2.VerificationFrame

    async def verify(self, request: VerifyRequest, wire: WireCount | None = None, *, model: str = "") -> Verification:
        """Asks for p at the draft's positions. Idempotent, counted, meant, cancelled and failing as `propose`."""
        return await self._ask(request, wire, model=model)

    def _replies_of(self, frame: bytes) -> Sequence[target_pb2.Verification]:
        return target_pb2.VerificationFrame.FromString(frame).verifications

    def _encode(self, request: VerifyRequest, call_id: int) -> target_pb2.VerifyRequest:
        return codec.encode_verify_request(request, call_id)

    def _decode(
        self, messages: list[target_pb2.Verification], requests: list[VerifyRequest]
    ) -> Sequence[Verification | Internal]:
        return replies.decode_verifications(messages, requests)
