"""One open stream of a link: the calls that wait on it, their timeouts, and the frames that carry them.

Calls that start in one turn of the event loop leave in one frame. Replies come back in any order; the replies of one
frame are decoded together. The stream fails as a whole: if its process ends, or sends an unexpected reply or bytes that
are not a frame, every waiting call fails, and the link (`specdec.rpc.link`) opens another stream. A transport
(`specdec.rpc.frame_transport`) carries the frames.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from specdec.contract.errors import Internal, Unavailable
from specdec.rpc import status_mapping
from specdec.rpc.frame_transport import FrameTransport
from specdec.rpc.framing import FRAME_BYTES, MAX_FRAME_ITEMS, join_items
from specdec.rpc.open_calls import CallTimeout, OpenCalls, PendingCall, UnexpectedReply, WireStats

#: A timer that fires this much too late shows that this event loop stalled, not that the replica did.
OWN_STALL_S = 0.02


class Step(NamedTuple):
    """The answer of one step of a run in a frame."""

    call_id: int
    num_bytes: int
    read: Callable[[Any], Any]
    """Returns the answer to a run's request, or Internal if it is malformed."""


class Replies(NamedTuple):
    """The contents of a frame; its steps are older than its items."""

    items: Sequence[tuple[Any, int]]
    """Reply items with their sizes in bytes."""
    steps: Sequence[Step] = ()


class RunCall(NamedTuple):
    """The call of a run that was sent."""

    stream: ReplicaStream
    call_id: int
    pending: PendingCall


class ReplicaStream:
    """The calls on one transport. Use from one event loop."""

    def __init__(
        self,
        transport: FrameTransport,
        address: str,
        *,
        read_replies: Callable[[bytes], Replies],
        decode: Callable[[list[Any], list[Any]], Sequence[Any]],
        check_handshake: Callable[[Any], None],
    ) -> None:
        """
        Args:
            transport: not connected yet.
            address: HOST:PORT of the replica, for messages.
            read_replies: returns the reply items and the steps of a frame; raises DecodeError.
            decode: returns the answers that the reply items of one frame give to their requests.
            check_handshake: called with the replica's metadata before its first reply; raises Unavailable to refuse it.
        """
        self._transport = transport
        self._address = address
        self._read_replies = read_replies
        self._decode = decode
        self._check_handshake = check_handshake
        self._loop = self.event_loop = asyncio.get_running_loop()
        self._calls = OpenCalls()
        self._outbox: deque[PendingCall] = deque()
        self._renewals: list[bytes] = []
        self._heard_at = 0.0
        """Time of the latest frame, by the event loop's clock."""
        self._has_shaken_hands = False
        self.never_connected = False
        """Set if the transport ended by itself before the handshake."""
        self.closed = False
        self._task = asyncio.create_task(self._run(), name=f"link {address}")

    @property
    def is_unix_socket(self) -> bool:
        return self._transport.is_unix_socket

    @property
    def is_unreachable_socket(self) -> bool:
        """True for a Unix socket to which no connection came about, as of a replica on another machine."""
        return self.is_unix_socket and self.never_connected

    @property
    def oldest_pending(self) -> PendingCall | None:
        """The call that has waited longest, or None."""
        return self._calls.oldest

    @property
    def has_only_runs(self) -> bool:
        """True if no call but runs waits for an answer."""
        return self._calls.are_all_runs

    def next_call_id(self) -> int:
        return self._calls.next_id()

    async def call(
        self, call_id: int, request: Any, item: bytes, wire: WireStats, call_timeout: CallTimeout | None
    ) -> Any:
        """Send one item and return its decoded reply.

        Raises:
            TimeoutError: `call_timeout` has passed.
            SpecdecError: as the links' methods state.
        """
        now = self._loop.time()
        pending = PendingCall(request, item, wire, self._loop.create_future(), now)
        self._calls.add(call_id, pending)
        self._outbox.append(pending)
        self._transport.notify()
        if call_timeout is not None:
            self._start_timer(pending, call_timeout, now, now)
        try:
            return await pending.answer
        finally:
            if pending.timer is not None:
                pending.timer.cancel()
            self.forget(call_id)

    def begin_run(self, call_id: int, request: Any, item: bytes, wire: WireStats) -> RunCall:
        """Send the call of a run."""
        pending = PendingCall(request, item, wire, self._loop.create_future(), self._loop.time())
        self._calls.add(call_id, pending)
        self._outbox.append(pending)
        self._transport.notify()
        return RunCall(self, call_id, pending)

    def renew(self, renewal: bytes) -> None:
        """Send an encoded renewal of a run."""
        self._renewals.append(renewal)
        self._transport.notify()

    def forget(self, call_id: int) -> None:
        """Note that the caller no longer waits for a call. Idempotent."""
        self._calls.forget(call_id)
        if self._calls.owes_too_many:
            self._end(f"{self._address}: the replica leaves calls unanswered")

    def _start_timer(self, pending: PendingCall, timeout: CallTimeout, started_at: float, heard_at: float) -> None:
        """Check the call again when the replica has been silent for the permitted time since `heard_at`."""
        until = min(heard_at + timeout.silence_s, started_at + timeout.total_s)
        pending.timer = self._loop.call_at(until, self._check_timeout, pending, timeout, started_at, heard_at, until)

    def _check_timeout(
        self, pending: PendingCall, timeout: CallTimeout, started_at: float, heard_at: float, expected_at: float
    ) -> None:
        if pending.answer.done():
            return
        now = self._loop.time()
        # A replica that answers other calls is busy: the more calls there are, the longer each of them waits.
        heard_since = self._heard_at
        # Once per call: while this loop stalled, nothing was sent and nothing was read.
        if now - expected_at > OWN_STALL_S and not pending.is_given_more:
            pending.is_given_more = True
            heard_since = now
        if heard_since > heard_at and now < started_at + timeout.total_s:
            self._start_timer(pending, timeout, started_at, heard_since)
        else:
            pending.answer.set_exception(TimeoutError())

    def break_off(self, reason: str) -> None:
        """Close the stream and fail its pending calls with Unavailable, at once."""
        self._task.cancel()
        self._end(reason)

    async def close(self) -> None:
        """Close the stream and fail its pending calls. Idempotent."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._end(f"{self._address}: the link was closed")  # for a task that never ran

    async def _run(self) -> None:
        reason = f"{self._address}: the link was closed"
        try:
            reason = await self._carry()
            self.never_connected = not self._has_shaken_hands
        finally:
            self._end(reason)

    async def _carry(self) -> str:
        """Exchange frames until the transport ends; return why it did."""
        try:
            return await self._transport.run(self)
        except DecodeError as error:
            return f"{self._address}: the replica sent bytes that are not a frame: {error}"
        except UnexpectedReply as error:
            return f"{self._address}: the replica {error}"
        except Unavailable as error:
            return f"{self._address}: {error.message}"

    def _end(self, reason: str) -> None:
        self.closed = True
        self._transport.abort()
        self._calls.fail_all(reason)
        self._outbox.clear()
        self._renewals.clear()

    # Called by the transport (`FrameExchange`):

    def accept_handshake(self, metadata: Any) -> None:
        self._check_handshake(metadata)
        self._has_shaken_hands = True

    def receive(self, frame: bytes) -> None:
        """Decode the replies of a frame together and give each caller its own.

        Raises:
            DecodeError: the bytes are not a frame.
            UnexpectedReply: raised after the other replies are delivered. The call that the reply was meant for would
                never be answered, so the stream ends.
        """
        self._heard_at = self._loop.time()
        items: list[Any] = []
        waiting: list[PendingCall] = []
        unexpected: UnexpectedReply | None = None
        heard_s = time.monotonic()
        replies = self._read_replies(frame)
        for step in replies.steps:
            unexpected = self._take_step(step, heard_s) or unexpected
        for item, num_bytes in replies.items:
            try:
                pending = self._calls.take(item.call_id)
            except UnexpectedReply as error:
                unexpected = error
                continue
            if pending is None:
                continue
            pending.wire.num_bytes += num_bytes
            pending.wire.heard_s = heard_s
            if item.HasField("status") and item.status.code:
                pending.answer.set_exception(status_mapping.from_item_status(item.status))
            else:
                items.append(item)
                waiting.append(pending)
        answers = self._decode(items, [pending.request for pending in waiting])
        for pending, answer in zip(waiting, answers, strict=True):
            if isinstance(answer, Internal):
                pending.answer.set_exception(Internal(f"{self._address}: {answer.message}"))
            else:
                pending.answer.set_result(answer)
        if unexpected is not None:
            raise unexpected

    def _take_step(self, step: Step, heard_s: float) -> UnexpectedReply | None:
        """Give a run its step; return the error of a step that belongs to no run."""
        try:
            pending = self._calls.stepping(step.call_id, self._heard_at)
        except UnexpectedReply as error:
            return error
        if pending is not None:
            pending.wire.num_bytes += step.num_bytes
            pending.wire.heard_s = heard_s
            answer = step.read(pending.request)
            if isinstance(answer, Internal):
                pending.answer.set_exception(Internal(f"{self._address}: {answer.message}"))
            else:
                assert pending.on_step is not None
                pending.on_step(answer)
        return None

    def next_frame(self) -> bytes | None:
        """Return a frame of calls that wait to be sent and have not been cancelled; None if there are none."""
        items: list[bytes] = []
        size = 0
        now_s = time.monotonic()
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
                pending.wire.sent_s = now_s
        renewals, self._renewals = self._renewals, []
        return join_items(items) + b"".join(renewals) if items or renewals else None
