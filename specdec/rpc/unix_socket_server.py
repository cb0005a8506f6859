"""The replica's side of Unix sockets: answers items of frames that arrive over a socket, as `frames` does over gRPC.

Items are answered and counted by `specdec.rpc.frames`; names, handshake and framing are in `specdec.rpc.unix_sockets`.
Started and stopped by `specdec.service.lifecycle` through the servicer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError, Message

from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import InvalidRequest, Unavailable
from specdec.rpc.bounds import check_num_fields
from specdec.rpc.frames import MAX_OPEN_ITEMS, FrameServer
from specdec.rpc.framing import MAX_FRAME_ITEMS
from specdec.rpc.handshake import require_meant
from specdec.rpc.interceptors import LOG_INTERVAL_S
from specdec.rpc.outgoing import Outgoing
from specdec.rpc.unix_sockets import (
    MAX_HANDSHAKE_BYTES,
    FrameReader,
    handshake,
    is_of_this_user,
    new_name,
    prefixed,
    received_handshake,
    socket_path,
)

#: Limit of open connections; a coordinator has one for each model.
MAX_CONNECTIONS = 256

_log = logging.getLogger(__name__)


class UnixSocketServer:
    """Accepts connections on a Unix socket and serves them in the same event loop."""

    def __init__(
        self, frames: FrameServer, frame_type: type[Message], info: Callable[[], EngineInfo], max_frame_bytes: int
    ) -> None:
        """
        Args:
            frames: answers items and knows whether the service drains.
            frame_type: message type of a frame of requests.
            info: returns the replica's description.
            max_frame_bytes: limit of a frame of requests; a peer that sends a longer one is disconnected.
        """
        self.frames = frames
        self.frame_type = frame_type
        self.info = info
        self.max_frame_bytes = max_frame_bytes
        self.name = ""
        """The socket's name; "" while none is open."""
        self.connections: set[UnixSocketConnection] = set()
        self._server: asyncio.Server | None = None
        self._logged_s = float("-inf")

    async def start(self) -> None:
        """Open the socket. If the system does not permit one, the service runs without it."""
        name = new_name()
        if not name:
            return
        try:
            self._server = await asyncio.get_running_loop().create_unix_server(
                lambda: UnixSocketConnection(self), socket_path(name)
            )
        except OSError as error:
            _log.warning("cannot open a Unix socket, serving over gRPC alone: %s", error)
        else:
            self.name = name

    async def close(self, grace_s: float) -> None:
        """Accept no more connections, give open ones of a draining service `grace_s`, abort the others. Idempotent."""
        if self._server is not None:
            self._server.close()
        if self.connections and grace_s > 0.0:
            await asyncio.wait([connection.over for connection in self.connections], timeout=grace_s)
        for connection in list(self.connections):
            connection.abort()

    def log_bad_peer(self, error: Exception) -> None:
        """Log that a peer sent something else than frames, at most once a second: all peers run as this user."""
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            _log.warning("closed a Unix-socket connection: %s", error)


class UnixSocketConnection(asyncio.Protocol):
    """One connection of a coordinator."""

    def __init__(self, server: UnixSocketServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(MAX_HANDSHAKE_BYTES)
        self._has_shaken_hands = False
        self._in_flight: set[asyncio.Task[None]] = set()
        self._outgoing = Outgoing(self._kick)
        self._is_flushing = False
        self._is_full = False
        """Set while the peer does not read what is sent to it."""
        self.over: asyncio.Future[None] = self._loop.create_future()
        """Done once the connection has ended."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not is_of_this_user(transport.get_extra_info("socket")):
            self._refuse("this Unix socket belongs to another user")
            return
        if len(self._server.connections) >= MAX_CONNECTIONS:
            self._refuse(f"{MAX_CONNECTIONS} connections are open, which is the limit")
            return
        self._server.connections.add(self)
        self._server.frames.watch_drain(self._kick)
        if self._server.frames.draining:  # it began to drain while this connection was being accepted
            self._kick()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._server.frames.forget_drain(self._kick)
        for task in self._in_flight:
            task.cancel()
        self.over.set_result(None)

    def pause_writing(self) -> None:
        self._is_full = True
        self._control_reading()

    def resume_writing(self) -> None:
        self._is_full = False
        self._control_reading()
        self._kick()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        received_s = time.monotonic()
        try:
            for frame in self._reader.frames(data):
                self._take_frame(frame, received_s)
        except (DecodeError, InvalidRequest) as error:
            self._server.log_bad_peer(error)
            self.abort()
        except Unavailable as error:
            self._refuse(error.message)

    def _refuse(self, reason: str) -> None:
        assert self._transport is not None
        self._transport.write(handshake(reason))
        self._transport.close()

    def _take_frame(self, frame: bytes, received_s: float) -> None:
        if not self._has_shaken_hands:
            self._shake_hands(received_handshake(frame))
            return
        check_num_fields(frame, self._server.frame_type)
        received = self._server.frame_type.FromString(frame)
        items = self._server.frames.items_of(received)
        if len(items) > MAX_FRAME_ITEMS:
            raise InvalidRequest(f"a frame of {len(items)} items; the limit is {MAX_FRAME_ITEMS}")
        for item in items:
            task = self._loop.create_task(self._reply(item, received_s))
            self._in_flight.add(task)
            task.add_done_callback(self._settle)
        self._server.frames.renew(received, self._outgoing)
        self._control_reading()

    def _shake_hands(self, lines: list[str]) -> None:
        info = self._server.info()
        self._outgoing.model = require_meant(lines[0], info)
        assert self._transport is not None
        self._transport.write(handshake(self._outgoing.model, info.incarnation))
        self._has_shaken_hands = True
        self._reader.max_frame_bytes = self._server.max_frame_bytes

    async def _reply(self, item: Any, received_s: float) -> None:
        self._outgoing.put_reply(await self._server.frames.reply_to(item, received_s, self._outgoing), received_s)
        if len(self._in_flight) == 1:  # no other reply can share the frame
            self._flush()
        else:
            self._kick()

    def _settle(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._control_reading()
        if self._server.frames.draining:
            self._kick()

    def _control_reading(self) -> None:
        """Stop reading from a peer that sends without limit or does not read, so that its own buffers fill up."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._is_full or len(self._in_flight) + self._outgoing.num_replies >= MAX_OPEN_ITEMS:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _kick(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        assert self._transport is not None
        while self._outgoing and not self._is_full and not self._transport.is_closing():
            parts = self._outgoing.take()
            self._transport.write(prefixed(self._server.frames.frame_of(parts).SerializeToString()))
        if self._server.frames.draining and not self._in_flight and not self._outgoing:
            self._transport.close()
