"""One open stream of a link: the calls that wait on it, and how their items travel.

What is asked within one turn of the event loop leaves in one frame; replies come back in any order, and those of a
frame are decoded together. A stream dies whole: the end of its process, an answer that nobody asked for or bytes that
are no frame fail every call that waits. Not here: opening one, and another after it (`client`); what items say
(`codec`, `replies`); call ids (`calls`). Called by links.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from specdec.errors import Internal, Unavailable
from specdec.rpc import status
from specdec.rpc.calls import CallTimeout, OpenCalls, PendingCall, UnexpectedReply, WireStats
from specdec.rpc.framing import FRAME_BYTES, MAX_FRAME_ITEMS, join_items

#: A timer that fires this much late says that the event loop stood still, not that a replica did.
OWN_STALL_S = 0.02


class LinkStream:
    """One open bidirectional call and the calls that wait on it. Dies whole; the link then opens another."""

    is_unix_socket = False
    has_missed = False
    """Whether it ended, by itself, before it met anybody: of a lane, whose calls can go another way then."""

    def __init__(
        self,
        call: Any,
        items_of: Callable[[bytes], Sequence[tuple[Any, int]]],
        decode: Callable[[list[Any], list[Any]], Sequence[Any]],
        address: str,
        shake_hands: Callable[[Any], None],
    ) -> None:
        """
        Args:
            call: takes and gives frames as bytes.
            items_of: the replies of a frame with their sizes in bytes; raises DecodeError.
            decode: the answers that replies of one frame give to their requests.
            address: of the replica.
            shake_hands: told the metadata of who answers, before any of its answers is; raises Unavailable to take
                none.
        """
        self._call = call
        self._items_of = items_of
        self._decode = decode
        self._address = address
        self._shake_hands = shake_hands
        self._loop = asyncio.get_running_loop()
        self._calls = OpenCalls()
        self._outbox: deque[PendingCall] = deque()
        self._wake = asyncio.Event()
        self._heard_at = 0.0
        """When the latest frame came."""
        self.closed = False
        self._task = asyncio.create_task(self._run(), name=f"link {address}")

    def next_call_id(self) -> int:
        return self._calls.next_id()

    async def ask(self, call_id: int, request: Any, item: bytes, wire: WireStats, patience: CallTimeout | None) -> Any:
        """Sends one item; returns its decoded reply. Raises TimeoutError when `patience` is over."""
        now = self._loop.time()
        pending = PendingCall(request, item, wire, self._loop.create_future(), now)
        self._calls.add(call_id, pending)
        self._outbox.append(pending)
        self._kick()
        if patience is not None:
            self._await_answer(pending, patience, now, now)
        try:
            return await pending.answer
        finally:
            if pending.timer is not None:
                pending.timer.cancel()
            self._calls.forget(call_id)
            if self._calls.owes_too_many:
                self._end(f"{self._address}: the replica leaves calls unanswered")

    def _await_answer(self, pending: PendingCall, patience: CallTimeout, asked_at: float, heard_at: float) -> None:
        """Looks again when the replica has been silent for too long since `heard_at`."""
        until = min(heard_at + patience.silence_s, asked_at + patience.total_s)
        pending.timer = self._loop.call_at(until, self._look, pending, patience, asked_at, heard_at, until)

    def _look(
        self, pending: PendingCall, patience: CallTimeout, asked_at: float, heard_at: float, expected_at: float
    ) -> None:
        if pending.answer.done():
            return
        now = self._loop.time()
        # One that answers others meanwhile is busy: the more there are, the longer each waits.
        heard_since = self._heard_at
        # Once a call: where this loop stood still, nothing was sent, and what came was not read.
        if now - expected_at > OWN_STALL_S and not pending.is_given_more:
            pending.is_given_more = True
            heard_since = now
        if heard_since > heard_at and now < asked_at + patience.total_s:
            self._await_answer(pending, patience, asked_at, heard_since)
        else:
            pending.answer.set_exception(TimeoutError())

    @property
    def oldest_pending(self) -> PendingCall | None:
        """The call that has waited longest; None where none waits."""
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

    def _kick(self) -> None:
        """Something is to be sent."""
        self._wake.set()

    def _hang_up(self) -> None:
        self._call.cancel()

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
        self._hang_up()
        self._calls.fail_all(reason)
        self._outbox.clear()

    async def _read(self) -> str:
        """Hands out replies until the stream ends; returns why it did."""
        has_met = False
        try:
            while (frame := await self._call.read()) is not grpc.aio.EOF:
                if not has_met:  # a call that fails before its first frame has better news than its metadata
                    self._shake_hands(await self._call.initial_metadata())
                    has_met = True
                self._heard_at = self._loop.time()
                self._deliver(frame)
        except grpc.aio.AioRpcError as error:
            return status.from_rpc_error(error, peer=self._address).message
        except DecodeError as error:
            return f"{self._address}: the replica sent what is no frame: {error}"
        except UnexpectedReply as error:
            return f"{self._address}: the replica {error}"
        except Unavailable as error:
            return f"{self._address}: {error.message}"
        return f"{self._address}: the replica closed the stream"

    def _deliver(self, frame: bytes) -> None:
        """Decodes the replies of a frame together and tells each caller its own.

        Raises:
            UnexpectedReply: once they are told. Whoever it was meant for would wait in vain, call after call.
        """
        items: list[Any] = []
        waiting: list[PendingCall] = []
        stray: UnexpectedReply | None = None
        heard_s = time.monotonic()
        for item, num_bytes in self._items_of(frame):
            try:
                pending = self._calls.take(item.call_id)
            except UnexpectedReply as error:
                stray = error
                continue
            if pending is None:
                continue
            pending.wire.num_bytes += num_bytes
            pending.wire.heard_s = heard_s
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
        return items
