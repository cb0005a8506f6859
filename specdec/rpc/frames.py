"""The replica's end of a link: answers the items of bidirectional frame streams.

Every item runs in its own task, so a slow session does not delay another; replies that are ready in the same turn of
the event loop share a frame. An item that fails is answered with an `ItemStatus` and does not end the stream. From here
an item goes to `specdec.rpc.replica_servicer`, and its reply returns in a frame to the coordinator's link
(`specdec.rpc.link`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from specdec.contract.errors import InvalidRequest, SpecdecError, Unavailable
from specdec.observability.logging import X_REQUEST_ID, bind, clean_request_id
from specdec.rpc import status_mapping
from specdec.rpc.framing import MAX_FRAME_ITEMS
from specdec.rpc.interceptors import internal_error, new_request_id
from specdec.rpc.outgoing import FrameParts, Outgoing

#: Limit of a stream's items in work or with an unwritten reply. At the limit the peer is not read until one has left.
MAX_OPEN_ITEMS = 4096

#: Number of a frame's items that start in one turn of the event loop; other streams wait for the end of the turn.
_ITEMS_A_TURN = 128

_log = logging.getLogger(__name__)


class FrameServer:
    """Answers the items of any number of streams of one service, over gRPC and over Unix sockets."""

    def __init__(
        self,
        *,
        items_of: Callable[[Any], Sequence[Any]],
        answer: Callable[[Any, float, Outgoing], Awaitable[Any]],
        reply_type: Callable[..., Any],
        frame_of: Callable[[FrameParts], Any],
        renewals_of: Callable[[Any], Sequence[Any]] = lambda frame: (),
    ) -> None:
        """
        Args:
            items_of: returns the request items of a frame.
            answer: turns a request item, the time at which its frame had been read (`time.monotonic`) and the stream's
                outgoing part into a reply item; raises SpecdecError for the item alone.
            reply_type: builds a reply item from `call_id` and `status`, for an item that failed.
            frame_of: packs replies and steps of runs into a frame.
            renewals_of: returns the renewals of runs in a frame.
        """
        self._items_of = items_of
        self._answer = answer
        self._reply_type = reply_type
        self._frame_of = frame_of
        self._renewals_of = renewals_of
        self._drain_watchers: set[Callable[[], None]] = set()
        self.draining = False

    async def serve(self, frames: AsyncIterator[Any], write: Callable[[Any], Awaitable[None]], model: str = "") -> None:
        """Serve one stream until the caller half-closes it or the service drains, and every item is answered.

        Cancelling this coroutine, as gRPC does when the peer is gone, cancels the items in flight. `model` is the
        fingerprint of the model that answers the stream.

        Raises:
            InvalidRequest: a frame of more than MAX_FRAME_ITEMS items.
        """
        stream = _ServedStream(self, frames, write, model)
        self.watch_drain(stream.wake.set)
        try:
            await stream.run()
        finally:
            self.forget_drain(stream.wake.set)

    def watch_drain(self, tell: Callable[[], None]) -> None:
        """Call `tell` on the service's event loop when the service begins to drain."""
        self._drain_watchers.add(tell)

    def forget_drain(self, tell: Callable[[], None]) -> None:
        """Undo `watch_drain`. Idempotent."""
        self._drain_watchers.discard(tell)

    def drain(self) -> None:
        """Refuse new items with DRAINING and end every stream once its items in flight are answered. Idempotent."""
        self.draining = True
        for wake in list(self._drain_watchers):
            wake()

    async def reply_to(self, item: Any, received_s: float, outgoing: Outgoing) -> Any:
        """Answer one item; an error becomes the status of its reply. A run puts its steps into `outgoing`."""
        ids = {"session_id": item.round.session_id, "epoch": item.round.epoch, "round_id": item.round.round_id}
        if item.round.x_request_id:
            ids[X_REQUEST_ID] = clean_request_id(item.round.x_request_id)
        with bind(**ids):
            _log.debug("call received")
            try:
                if self.draining:
                    raise Unavailable("the replica is draining", reason="DRAINING")
                return await self._answer(item, received_s, outgoing)
            except SpecdecError as error:
                failure = error.with_traceback(None)  # it holds this frame, which holds the error
            except Exception as error:
                failure = internal_error(error, new_request_id())
        return self._reply_type(call_id=item.call_id, status=status_mapping.to_item_status(failure))

    def items_of(self, frame: Any) -> Sequence[Any]:
        return self._items_of(frame)

    def renew(self, frame: Any, outgoing: Outgoing) -> None:
        """Apply the renewals of a frame to the runs of its stream; while the service drains, its runs end."""
        if self.draining:
            return
        for renewal in self._renewals_of(frame):
            outgoing.renew(renewal.call_id, renewal.until, renewal.committed_len)

    def frame_of(self, parts: FrameParts) -> Any:
        return self._frame_of(parts)


class _ServedStream:
    """One stream: a task that reads, a task per item, and `run`, which writes."""

    def __init__(
        self, server: FrameServer, frames: AsyncIterator[Any], write: Callable[[Any], Awaitable[None]], model: str
    ) -> None:
        self._server = server
        self._frames = frames
        self._write = write
        self._in_flight: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(MAX_OPEN_ITEMS)
        self._half_closed = False
        self.wake = asyncio.Event()
        self._outgoing = Outgoing(self.wake.set, model)

    async def run(self) -> None:
        reader = asyncio.create_task(self._read())
        try:
            while not self._finished():
                await self.wake.wait()
                self.wake.clear()
                while self._outgoing:
                    parts = self._outgoing.take()
                    await self._write(self._server.frame_of(parts))
                    for _ in parts.replies:
                        self._room.release()
                if reader.done() and reader.exception() is not None:
                    await reader
        finally:
            tasks = [reader, *self._in_flight]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            del reader, tasks  # their exceptions hold this frame, which holds them: a cycle

    def _finished(self) -> bool:
        return (self._half_closed or self._server.draining) and not self._in_flight and not self._outgoing

    async def _read(self) -> None:
        try:
            async for frame in self._frames:
                received_s = time.monotonic()
                items = self._server.items_of(frame)
                if len(items) > MAX_FRAME_ITEMS:
                    raise InvalidRequest(f"a frame of {len(items)} items; the limit is {MAX_FRAME_ITEMS}")
                for index, item in enumerate(items, 1):
                    if index % _ITEMS_A_TURN == 0:
                        await asyncio.sleep(0)
                    await self._room.acquire()  # a peer that sends without limit fills its own buffers
                    task = asyncio.create_task(self._reply(item, received_s))
                    self._in_flight.add(task)
                    task.add_done_callback(self._settle)
                self._server.renew(frame, self._outgoing)
        finally:
            self._half_closed = True
            self.wake.set()

    async def _reply(self, item: Any, received_s: float) -> None:
        self._outgoing.put_reply(await self._server.reply_to(item, received_s, self._outgoing), received_s)
        self.wake.set()

    def _settle(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self.wake.set()
