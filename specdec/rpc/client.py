"""Links: how a coordinator calls one draft or target replica.

A round's call comes from `coordinator/round/session_calls` and goes, as an item of a frame, to the replica, where
`specdec.rpc.frames` takes it out; its answer comes back the same way.

A link keeps one bidirectional stream open for each model (`link_stream`) and multiplexes any number of calls on it. It
dials when first used and opens another stream after a break; it does not retry calls, because only the round loop knows
what a late answer is worth. A stream is one model's (`identity`): a call that is meant for a model is never answered by
another, whatever process listens at the address by then.

Not here: choosing replicas, deadlines, retries (the coordinator); how an address is dialled (`channels`). Called by the
coordinator, and by tests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from specdec.errors import Internal, InvalidRequest, Unavailable
from specdec.rpc import codec, replies, status
from specdec.rpc.bounds import check_num_fields
from specdec.rpc.calls import CallTimeout, WireStats
from specdec.rpc.channels import dial
from specdec.rpc.framing import MAX_FRAME_ITEMS, split_items
from specdec.rpc.identity import check_answering, meant_for
from specdec.rpc.link_stream import LinkStream
from specdec.rpc.rounds import tenant_on_wire
from specdec.rpc.unix_socket_stream import UnixSocketStream
from specdec.rpc.unix_sockets import is_name
from specdec.tenant import DEFAULT_TENANT
from specdec.types import EngineInfo, Proposal, ProposeRequest, Score, ScoreRequest, Verification, VerifyRequest
from specdec.v1 import common_pb2, draft_pb2, target_pb2

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")

#: Calls in a row that found no other one pending, until the link takes it that they come one at a time.
CALLS_ALONE = 8

#: For `info`, `release` and `score`; streamed calls have no deadline of their own.
_CALL_TIMEOUT_S = 5.0

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


_log = logging.getLogger(__name__)


def _check_num_items(count: int) -> None:
    if count > MAX_FRAME_ITEMS:
        raise DecodeError(f"{count} items; the limit is {MAX_FRAME_ITEMS}")


def _open_ones(streams: dict[str, LinkStream]) -> dict[str, LinkStream]:
    return {model: stream for model, stream in streams.items() if not stream.closed}


class _Link(Generic[RequestT, ReplyT]):
    """What both links share. Use from one event loop; any number of calls at once."""

    def __init__(self, address: str, *, max_message_bytes: int = 4 << 20) -> None:
        """
        Args:
            address: HOST:PORT of the replica. Nothing is dialled yet.
            max_message_bytes: the replica's limit; a larger item is refused here, sparing the others the break.
        """
        self.address = address
        self._max_message_bytes = max_message_bytes
        self._channel: grpc.aio.Channel | None = None
        self._streams: dict[str, LinkStream] = {}
        """By the model they are meant for."""
        self._device_streams: dict[str, LinkStream] = {}
        """The same, over the device lane."""
        self._num_alone = 0
        self._closed = False
        self.on_handshake: Callable[[str], None] = lambda incarnation: None
        """Told, once a stream, the incarnation of the process that answers it."""
        self.lane = ""
        """Name of the replica's lane, by its own word; "" where it has none."""
        self.device_lane = ""
        """Of the one that the device's own thread reads: for calls that come one at a time, because nothing is read
        while a step runs."""
        self._lost_unix_sockets: set[str] = set()
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
        self, request: RequestT, wire: WireStats | None, *, model: str, patience: CallTimeout | None = None
    ) -> ReplyT:
        wire = WireStats() if wire is None else wire
        while True:
            stream = self._choose_stream(model)
            call_id = stream.next_call_id()
            item = self._encode(request, call_id).SerializeToString()
            if len(item) + _FRAME_OVERHEAD_BYTES > self._max_message_bytes:
                raise InvalidRequest(
                    f"{self.address}: a request of {len(item)} bytes; the limit is {self._max_message_bytes}"
                )
            try:
                reply: ReplyT = await stream.ask(call_id, request, item, wire, patience)
            except Unavailable as error:
                # A lane's name says nothing of where its replica is: on another machine or in another container nobody
                # answers to it. It is not tried again, and a call may be repeated.
                if not stream.has_missed:
                    raise
                _log.info("calls of %s go another way: %s", self.address, error.message)
            else:
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

    def _every_stream(self) -> Iterator[LinkStream]:
        return itertools.chain(self._streams.values(), self._device_streams.values())

    def _choose_stream(self, model: str) -> LinkStream:
        self._num_alone = self._num_alone + 1 if self.oldest_pending is None else 0
        if self._num_alone < CALLS_ALONE or not self._has_unix_socket(self.device_lane):
            return self._open_stream(model)
        stream = self._device_streams.get(model)
        if stream is None or stream.closed:
            self._device_streams = _open_ones(self._device_streams)
            stream = self._device_streams[model] = self._open_unix_socket(
                self.device_lane, model, is_for_lone_calls=True
            )
        return stream

    def _open_stream(self, model: str) -> LinkStream:
        stream = self._streams.get(model)
        if (
            stream is not None
            and not stream.is_unix_socket
            and stream.oldest_pending is None
            and self._has_unix_socket(self.lane)
        ):
            stream.break_off(f"{self.address}: the replica has a lane")
        if stream is None or stream.closed:
            self._streams = _open_ones(self._streams)
            if self._has_unix_socket(self.lane):
                stream = self._open_unix_socket(self.lane, model, is_for_lone_calls=False)
            else:
                stream = self._open_grpc(model)
            self._streams[model] = stream
        return stream

    def _has_unix_socket(self, name: str) -> bool:
        """Whether the replica has a lane that can be used and was not lost before."""
        return not self._closed and name not in self._lost_unix_sockets and is_name(name)

    def _open_unix_socket(self, name: str, model: str, *, is_for_lone_calls: bool) -> LinkStream:
        def note_lost() -> None:
            self._lost_unix_sockets = {name, *self._lost_unix_sockets} & {self.lane, self.device_lane}

        shake_hands = partial(self._shake_hands, model)
        return UnixSocketStream(name, model, self._items_of, self._decode, self.address, shake_hands, note_lost,
                          is_for_lone_calls=is_for_lone_calls)  # fmt: skip

    def _open_grpc(self, model: str) -> LinkStream:
        # Without serializers: frames are bytes here.
        call: Any = self._dial().stream_stream(self._stream_method)(metadata=meant_for(model))
        return LinkStream(call, self._items_of, self._decode, self.address, partial(self._shake_hands, model))

    def _shake_hands(self, model: str, metadata: Any) -> None:
        self.on_handshake(check_answering(metadata, model))

    def _dial(self) -> grpc.aio.Channel:
        if self._closed:
            raise Unavailable(f"{self.address}: the link is closed")
        if self._channel is None:
            self._channel = dial(self.address, _CHANNEL_OPTIONS)
        return self._channel

    @property
    def oldest_pending(self) -> object:
        """The streamed call that has waited longest, by identity; None where none waits."""
        waiting = [call for stream in self._every_stream() if (call := stream.oldest_pending) is not None]
        return min(waiting, key=lambda call: call.asked_at, default=None)

    def break_off(self, reason: str) -> None:
        """Fails every streamed call that is pending with Unavailable, at once; the next one opens another stream."""
        for stream in self._every_stream():
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

    async def release(self, session_ids: Sequence[str], *, tenant: str = DEFAULT_TENANT) -> None:
        """Frees the KV of a tenant's sessions on the replica. Idempotent.

        Raises:
            Unavailable: it cannot be reached, or does not answer in time.
        """
        request = common_pb2.ReleaseRequest(session_ids=session_ids, tenant=tenant_on_wire(tenant))
        await self._unary("Release", request, common_pb2.ReleaseResponse)

    async def score(self, request: ScoreRequest) -> Score:
        """Asks what the draft would have drawn committed tokens with. Read-only, so it may be repeated.

        Raises:
            ResourceExhausted: the replica is needed by others (REPLICA_BUSY).
            Unavailable: it cannot be reached, does not answer in time, or answers nonsense.
            SpecdecError: what it answered.
        """
        answer = await self._unary("Score", codec.encode_score_request(request), common_pb2.ScoreResponse)
        try:
            return codec.decode_score(answer, len(request.token_ids))
        except ValueError as error:
            raise Unavailable(f"{self.address}: the replica answered Score with what is no score: {error}") from error

    async def _unary(self, method: str, request: Message, answer_type: type[Message]) -> Any:
        service = self._stream_method.rpartition("/")[0]
        # Without serializers: gRPC logs a traceback of what it cannot read, and answers None.
        call: Any = self._dial().unary_unary(f"{service}/{method}")
        try:
            answer = await call(request.SerializeToString(), timeout=_CALL_TIMEOUT_S)
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
        for stream in self._every_stream():
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
        wire: WireStats | None = None,
        *,
        model: str = "",
        patience: CallTimeout | None = None,
    ) -> Proposal:
        """Asks for draft tokens. Idempotent by (session, epoch, round) and digest, so it may be repeated.

        Cancelling forgets the call and disturbs no other; the replica may still finish it. What was sent and received
        is added to `wire` however the call ends. It is given up when `patience` is over; None: never. `model` is
        the fingerprint of the only model that may answer; "" lets any.

        Raises:
            TimeoutError: `patience` is over.
            Unavailable: the replica cannot be reached, broke off or serves another model; at once, for every call
                pending on it.
            Internal: its answer does not fit the request.
            SpecdecError: what the replica answered (KvMiss, StaleEpoch, ResourceExhausted, InvalidRequest, ...).
        """
        return await self._ask(request, wire, model=model, patience=patience)

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

    async def verify(self, request: VerifyRequest, wire: WireStats | None = None, *, model: str = "") -> Verification:
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


def open_link(role: str, address: str) -> DraftLink | TargetLink:
    """The link to the replica of a role (draft | target) at HOST:PORT. Nothing is dialled yet."""
    return DraftLink(address) if role == "draft" else TargetLink(address)
