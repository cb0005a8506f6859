"""Links: how a coordinator calls one draft or target replica.

A round's call comes from `coordinator/round/session_calls` and goes, as an item of a frame, to the replica, where
`specdec.rpc.frames` takes it out; its answer comes back the same way.

A link keeps one stream open per model (`replica_stream`) and multiplexes any number of calls on it. It connects at the
first use and opens another stream after a break. It does not retry calls, because only the round loop knows whether a
late answer is still of use. A stream belongs to one model (`handshake`), so a call that is meant for a model is never
answered by another, even if another process listens at the address by then. Choosing replicas and deadlines is the
coordinator's task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from specdec.access.tls import Tls
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import Internal, InvalidRequest, Unavailable
from specdec.contract.tenant import DEFAULT_TENANT
from specdec.contract.types import Score, ScoreRequest
from specdec.rpc import codec, status_mapping
from specdec.rpc.bounds import check_num_fields
from specdec.rpc.credentials import describe_refused_connection
from specdec.rpc.framing import MAX_FRAME_ITEMS, split_items
from specdec.rpc.handshake import Metadata, check_answering
from specdec.rpc.open_calls import CallTimeout, WireStats
from specdec.rpc.replica_stream import ReplicaStream, Replies
from specdec.rpc.rounds import tenant_on_wire
from specdec.rpc.transport_selector import TransportSelector
from specdec.v1 import common_pb2

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")

#: Time limit of `info`, `release` and `score`; streamed calls have none of their own.
_CALL_TIMEOUT_S = 5.0

#: Upper bound of the tag and length in front of an item in its frame.
_FRAME_OVERHEAD_BYTES = 16

_log = logging.getLogger(__name__)


def _check_num_items(count: int) -> None:
    if count > MAX_FRAME_ITEMS:
        raise DecodeError(f"{count} items; the limit is {MAX_FRAME_ITEMS}")


class Link(Generic[RequestT, ReplyT]):
    """The parts that both links share. Use from one event loop; any number of calls at once."""

    # Set by a subclass:
    _stream_method: str
    """Full name of the gRPC method that frames travel on."""
    _reply_type: type[Message]
    _frame_type: type[Message]
    """Type of a frame of replies."""

    def __init__(
        self,
        address: str,
        *,
        metadata: Metadata = (),
        max_message_bytes: int = 4 << 20,
        tls: Tls | None = None,
    ) -> None:
        """
        Args:
            address: HOST:PORT of the replica. Nothing is dialled yet.
            metadata: sent with every gRPC call: the credential of the caller.
            max_message_bytes: the replica's limit. A larger item is refused here, because on the wire it would break
                the stream for the other calls.
            tls: credentials of gRPC connections; None: plaintext.
        """
        self.address = address
        self.transports = TransportSelector(address, self._stream_method, metadata, tls)
        self._max_message_bytes = max_message_bytes
        self._streams: dict[str, ReplicaStream] = {}
        """Open streams by the model's fingerprint."""
        self.on_handshake: Callable[[str], None] = lambda incarnation: None
        """Called once per stream with the incarnation of the process that answers it."""
        self.heard_at = 0.0
        """Time of the replica's latest streamed answer, also of a late one, by the event loop's clock; 0: none yet."""

    def _read_frame(self, frame: bytes) -> Replies:
        """Return the contents of a frame as protobuf's own parser reads them. Raises DecodeError."""
        raise NotImplementedError

    def _encode(self, request: RequestT, call_id: int) -> Message:
        raise NotImplementedError

    def _decode(self, messages: list[Any], requests: list[RequestT]) -> Sequence[ReplyT | Internal]:
        """Return the decoded replies of one frame; a malformed reply becomes its own error."""
        raise NotImplementedError

    async def _call(
        self, request: RequestT, wire: WireStats | None, *, model: str, call_timeout: CallTimeout | None = None
    ) -> ReplyT:
        wire = WireStats() if wire is None else wire
        while True:
            stream = self._choose_stream(model)
            call_id = stream.next_call_id()
            item = self._encode_item(request, call_id)
            try:
                reply: ReplyT = await stream.call(call_id, request, item, wire, call_timeout)
            except Unavailable as error:
                if not stream.is_unreachable_socket:  # the selector does not choose it again; a call may be repeated
                    raise
                _log.info("Unix socket not usable, using another transport: %s", error.message)
            else:
                return reply

    def _encode_item(self, request: RequestT, call_id: int) -> bytes:
        item = self._encode(request, call_id).SerializeToString()
        if len(item) + _FRAME_OVERHEAD_BYTES > self._max_message_bytes:
            raise InvalidRequest(
                f"{self.address}: a request of {len(item)} bytes; the limit is {self._max_message_bytes}"
            )
        return item

    def _choose_stream(self, model: str) -> ReplicaStream:
        stream = self._streams.get(model)
        if (
            stream is not None
            and self.transports.has_unix_socket
            and not stream.is_unix_socket
            and stream.oldest_pending is None
        ):
            stream.break_off(f"{self.address}: moving to the replica's Unix socket")
        if stream is None or stream.closed:
            self._streams = {kept: open_ for kept, open_ in self._streams.items() if not open_.closed}
            stream = self._streams[model] = ReplicaStream(
                self.transports.open(model),
                self.address,
                read_replies=self._read_replies,
                decode=self._decode,
                check_handshake=partial(self._check_handshake, model),
            )
        return stream

    def _check_handshake(self, model: str, metadata: Any) -> None:
        self.on_handshake(check_answering(metadata, model))

    def _read_replies(self, frame: bytes) -> Replies:
        """Return the contents of a frame. Raises DecodeError."""
        self.heard_at = asyncio.get_running_loop().time()
        check_num_fields(frame, self._frame_type)
        items = split_items(frame)
        if items is None:  # the frame has fields of a later version, or is broken
            replies = self._read_frame(frame)
            _check_num_items(len(replies.items) + len(replies.steps))
            return replies
        _check_num_items(len(items))
        return self._sort([(self._reply_type.FromString(item), len(item)) for item in items])

    def _sort(self, items: list[tuple[Any, int]]) -> Replies:
        """Return reply items, with their sizes in bytes, apart from steps of runs."""
        return Replies(items)

    @property
    def oldest_pending(self) -> object:
        """The streamed call or step that has waited longest, to be compared by identity; None if none waits."""
        waiting = [call for stream in self._streams.values() if (call := stream.oldest_pending) is not None]
        return min(waiting, key=lambda call: call.started_at).waits_for if waiting else None

    @property
    def has_only_runs(self) -> bool:
        """True if no streamed call but runs waits for an answer."""
        return all(stream.has_only_runs for stream in self._streams.values())

    def leave_models(self, served: Collection[str]) -> None:
        """Close idle streams of models that the replica does not serve any more; `served` are the fingerprints."""
        for model, stream in self._streams.items():
            if model and model not in served and stream.oldest_pending is None:
                stream.break_off(f"{self.address}: the replica does not serve this model any more")

    def break_off(self, reason: str) -> None:
        """Fail every pending streamed call with Unavailable, at once; the next call opens another stream."""
        for stream in self._streams.values():
            stream.break_off(reason)

    async def info(self) -> EngineInfo:
        """Return the replica's description of itself.

        Raises:
            Unavailable: it cannot be reached, does not answer in time, or its answer is not a valid description.
        """
        message = await self._unary("GetEngineInfo", common_pb2.GetEngineInfoRequest(), common_pb2.EngineInfo)
        if len(message.eos_token_ids) > message.vocabulary_size:
            raise Unavailable(
                f"{self.address}: the replica names {len(message.eos_token_ids)} EOS tokens, more than its vocabulary "
                f"of {message.vocabulary_size}"
            )
        return codec.decode_engine_info(message)

    async def release(self, session_ids: Sequence[str], *, tenant: str = DEFAULT_TENANT) -> None:
        """Free the KV of a tenant's sessions on the replica. Idempotent.

        Raises:
            Unavailable: it cannot be reached, or does not answer in time.
        """
        request = common_pb2.ReleaseRequest(session_ids=session_ids, tenant=tenant_on_wire(tenant))
        await self._unary("Release", request, common_pb2.ReleaseResponse)

    async def end_turns(
        self, epochs: Mapping[str, int], *, resumable_ids: Collection[str] = (), tenant: str = DEFAULT_TENANT
    ) -> None:
        """End a tenant's turns on the replica: abandon their calls, and give back the KV blocks reserved for them.

        Idempotent. A replica of an earlier version frees the sessions' KV instead.

        Args:
            epochs: epoch of the turn by its session's id.
            resumable_ids: sessions whose turn has ended before its last token and may be resumed.
            tenant: whose sessions they are.

        Raises:
            Unavailable: it cannot be reached, or does not answer in time.
        """
        request = common_pb2.ReleaseRequest(
            session_ids=epochs.keys(),
            tenant=tenant_on_wire(tenant),
            epochs=epochs.values(),
            resumable_ids=resumable_ids,
        )
        await self._unary("Release", request, common_pb2.ReleaseResponse)

    async def set_draining(self, draining: bool) -> tuple[int, int]:
        """Let the replica refuse new sessions, or accept them again. Idempotent.

        Returns:
            The number of streams that still run there, and the number of sessions whose KV it holds.

        Raises:
            Unsupported: it is a replica of an earlier version.
            Unavailable: it cannot be reached, or does not answer in time.
        """
        request = common_pb2.SetDrainingRequest(draining=draining)
        answer = await self._unary("SetDraining", request, common_pb2.SetDrainingResponse)
        return answer.num_streams, answer.num_sessions

    async def score(self, request: ScoreRequest) -> Score:
        """Ask with which probabilities the draft would have drawn committed tokens. Read-only, so it may be repeated.

        Raises:
            ResourceExhausted: the replica is busy with other calls (REPLICA_BUSY).
            Unavailable: it cannot be reached, does not answer in time, or its answer is invalid.
            SpecdecError: the error that the replica answered.
        """
        answer = await self._unary("Score", codec.encode_score_request(request), common_pb2.ScoreResponse)
        try:
            return codec.decode_score(answer, len(request.token_ids))
        except ValueError as error:
            raise Unavailable(f"{self.address}: the replica sent an invalid answer to Score: {error}") from error

    async def _unary(self, method: str, request: Message, answer_type: type[Message]) -> Any:
        service = self._stream_method.rpartition("/")[0]
        # Without serializers: gRPC would log a traceback for bytes that it cannot read, and return None.
        call: Any = self.transports.channel().unary_unary(f"{service}/{method}")
        try:
            answer = await call(request.SerializeToString(), timeout=_CALL_TIMEOUT_S, metadata=self.transports.metadata)
            check_num_fields(answer, answer_type)
            return answer_type.FromString(answer)
        except asyncio.CancelledError:
            # When a channel is closed, gRPC cancels whatever awaits one of its calls, as if the caller were cancelled.
            task = asyncio.current_task()
            if not self.transports.is_closed or (task is not None and task.cancelling()):
                raise
            raise Unavailable(f"{self.address}: the link was closed") from None
        except grpc.aio.AioRpcError as error:
            if refused := describe_refused_connection(error.details() or "", self.transports.tls):
                self.transports.note_refused_connection()
                raise Unavailable(f"{self.address}: {refused}") from error
            raise status_mapping.from_rpc_error(error, peer=self.address) from error
        except DecodeError as error:
            raise Unavailable(f"{self.address}: the replica sent an invalid answer to {method}: {error}") from error

    async def close(self) -> None:
        """Fail pending calls with Unavailable and disconnect. Idempotent; the link cannot be used afterwards."""
        self.transports.refuse()
        for stream in list(self._streams.values()):
            await stream.close()
        await self.transports.close()
