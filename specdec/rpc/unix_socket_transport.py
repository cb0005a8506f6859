"""The frame transport over a replica's Unix socket, from the coordinator's side.

Calls that start in one turn of the event loop leave in one frame at the end of that turn, and an answer is decoded in
the turn that reads it. The replica's side is `specdec.rpc.unix_socket_server`, the handshake and the framing are in
`specdec.rpc.unix_sockets`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from google.protobuf.message import DecodeError

from specdec.contract.errors import Unavailable
from specdec.rpc.frame_transport import FrameExchange
from specdec.rpc.handshake import INCARNATION_KEY, MODEL_KEY
from specdec.rpc.open_calls import UnexpectedReply
from specdec.rpc.unix_sockets import (
    MAX_HANDSHAKE_BYTES,
    FrameReader,
    handshake,
    is_of_this_user,
    prefixed,
    received_handshake,
    socket_path,
)

#: Time limit of a connection attempt; on one machine it succeeds at once or not at all.
CONNECT_TIMEOUT_S = 1.0

_MAX_FRAME_BYTES = 64 << 20  # the same limit as gRPC's for answers of a replica


class UnixSocketTransport(asyncio.Protocol):
    """Frames over one connection to a Unix socket."""

    is_unix_socket = True

    def __init__(self, name: str, model: str, address: str, on_lost: Callable[[], None]) -> None:
        """
        Args:
            name: the socket's name.
            model: fingerprint of the only model that may answer; "": any.
            address: HOST:PORT of the replica, for messages.
            on_lost: called when the connection ends or fails, unless it was closed here.
        """
        self._name = name
        self._model = model
        self._address = address
        self._on_lost = on_lost
        self._exchange: FrameExchange
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(MAX_HANDSHAKE_BYTES)
        self._has_shaken_hands = False
        self._is_flushing = False
        self._is_full = False
        """Set while the replica does not read: unsent calls wait in the stream, where they can still be cancelled."""
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[str | Exception] = self._loop.create_future()
        """Why the connection ended."""

    async def run(self, exchange: FrameExchange) -> str:
        self._exchange = exchange
        end = await self._connect_and_wait()
        self._on_lost()
        if isinstance(end, Exception):
            raise end
        return end

    async def _connect_and_wait(self) -> str | Exception:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._loop.create_unix_connection(lambda: self, socket_path(self._name))
        except (OSError, TimeoutError) as error:
            return f"{self._address}: cannot connect to the replica's Unix socket: {error or 'timed out'}"
        return await self._end

    def notify(self) -> None:
        if self._transport is not None and not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # Called by asyncio:

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if not is_of_this_user(transport.get_extra_info("socket")):
            self._finish(f"{self._address}: the replica's Unix socket belongs to another user")
            transport.abort()
            return
        self._transport = transport
        transport.write(handshake(self._model))
        self._flush()

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.frames(data):
                self._take_frame(frame)
        except (DecodeError, UnexpectedReply, Unavailable) as error:
            self._finish(error)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self.notify()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(f"{self._address}: the replica closed the Unix socket" + (f": {exc}" if exc else ""))

    def _take_frame(self, frame: bytes) -> None:
        if self._has_shaken_hands:
            self._exchange.receive(frame)
            return
        lines = received_handshake(frame)
        if len(lines) != 2:
            raise Unavailable(lines[0])
        self._exchange.accept_handshake(((MODEL_KEY, lines[0]), (INCARNATION_KEY, lines[1])))
        self._has_shaken_hands = True
        self._reader.max_frame_bytes = _MAX_FRAME_BYTES

    def _finish(self, end: str | Exception) -> None:
        if not self._end.done():
            self._end.set_result(end)

    def _flush(self) -> None:
        self._is_flushing = False
        assert self._transport is not None
        while not self._is_full and (frame := self._exchange.next_frame()):
            self._transport.write(prefixed(frame))
