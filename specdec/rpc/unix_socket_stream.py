"""The link's end of a lane: the calls of a `LinkStream`, their frames over a socket instead of a gRPC stream.

What is asked within one turn of the event loop is written at its end, or at once where calls come one at a time; an
answer is decoded in the turn that reads it. Not here: which of the two a link opens (`client`), calls and patience
(`link_stream`), what the ends of a socket say to each other (`lanes`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from specdec.errors import Unavailable
from specdec.rpc.calls import UnexpectedReply
from specdec.rpc.framing import join_items
from specdec.rpc.identity import INCARNATION_KEY, MODEL_KEY
from specdec.rpc.link_stream import LinkStream
from specdec.rpc.unix_sockets import (
    MAX_HELLO_BYTES,
    FrameReader,
    handshake,
    is_of_this_user,
    prefixed,
    received_handshake,
    socket_path,
)

#: How long a lane may take to connect; on one machine it is there at once, or not at all.
CONNECT_TIMEOUT_S = 1.0

_MAX_FRAME_BYTES = 64 << 20  # as gRPC takes from a replica


class UnixSocketStream(LinkStream, asyncio.Protocol):
    """One open lane and the calls that wait on it."""

    is_unix_socket = True

    def __init__(
        self,
        name: str,
        model: str,
        items_of: Callable[[bytes], Sequence[tuple[Any, int]]],
        decode: Callable[[list[Any], list[Any]], Sequence[Any]],
        address: str,
        shake_hands: Callable[[Any], None],
        on_lost: Callable[[], None],
        *,
        is_for_lone_calls: bool,
    ) -> None:
        """
        Args:
            name: of the lane.
            model: the only one that may answer; "": any.
            on_lost: told when it is over, unless it was closed here.
            is_for_lone_calls: whether calls come one at a time, so that none has another to share a frame with.
        """
        self._name = name
        self._model = model
        self._on_lost = on_lost
        self._is_for_lone_calls = is_for_lone_calls
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(MAX_HELLO_BYTES)
        self._has_met = False
        self._is_flushing = False
        self._is_full = False
        """Whether the replica does not read what it is written: what is asked waits here, where it can be given up."""
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        super().__init__(None, items_of, decode, address, shake_hands)

    # asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if not is_of_this_user(transport.get_extra_info("socket")):
            self._lose(f"{self._address}: its lane is another user's")
            transport.abort()
            return
        self._transport = transport
        transport.write(handshake(self._model))
        self._flush()

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.frames(data):
                self._take_frame(frame)
        except DecodeError as error:
            self._lose(f"{self._address}: the replica sent what is no frame: {error}")
        except UnexpectedReply as error:
            self._lose(f"{self._address}: the replica {error}")
        except Unavailable as error:
            self._lose(f"{self._address}: {error.message}")

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._kick()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(f"{self._address}: the replica closed the lane" + (f": {exc}" if exc else ""))

    def _take_frame(self, frame: bytes) -> None:
        if self._has_met:
            self._heard_at = self._loop.time()
            self._deliver(frame)
            return
        words = received_handshake(frame)
        if len(words) != 2:
            raise Unavailable(words[0])
        self._shake_hands(((MODEL_KEY, words[0]), (INCARNATION_KEY, words[1])))
        self._has_met = True
        self._reader.max_frame_bytes = _MAX_FRAME_BYTES

    def _lose(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(reason)

    # LinkStream's

    async def _run(self) -> None:
        reason = f"{self._address}: the link was closed"
        try:
            reason = await self._connect_and_wait()
            self.has_missed = not self._has_met
            self._on_lost()
        finally:
            self._end(reason)

    async def _connect_and_wait(self) -> str:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._loop.create_unix_connection(lambda: self, socket_path(self._name))
        except (OSError, TimeoutError) as error:
            return f"{self._address}: its lane does not answer: {error}"
        return await self._over

    def _kick(self) -> None:
        if self._transport is None or self._is_flushing:
            return
        if self._is_for_lone_calls:
            self._flush()
        else:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        assert self._transport is not None
        while not self._is_full and (items := self._take()):
            self._transport.write(prefixed(join_items(items)))

    def _hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()
