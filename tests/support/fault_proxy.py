"""A TCP proxy whose network is as bad as a test wants: delay, throttle, cuts, silence and half-open connections.

It knows nothing of what it carries. Use it from one event loop. Random faults come from a seed. Called by tests in
tests/failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

_PIECE_BYTES = 16 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass
class Faults:
    """Faults of every connection of a proxy. They may be changed at any time."""

    delay_s: float = 0.0
    """Time that each piece of data waits, in each direction."""
    bytes_per_s: float = 0.0
    """Largest rate of each connection in each direction; 0: no limit."""
    cut_share: float = 0.0
    """Probability that a connection is cut after a piece of data from the server."""
    is_refusing: bool = False
    """True while new connections are closed at once."""


class _Connection:
    """One client's connection and the one to the server."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._writers = (client, server)
        self.is_half_open = False

    def cut(self) -> None:
        """Reset both connections."""
        self.is_half_open = False
        for writer in self._writers:
            _reset(writer)

    def close(self) -> None:
        """Close both connections after what was written to them."""
        for writer in self._writers:
            writer.close()

    def lose_server(self) -> None:
        """Reset the server's connection; the client's stays open and silent."""
        self.is_half_open = True
        _reset(self._writers[1])


class FaultProxy:
    """A listener on loopback in front of one server. Use as an async context manager."""

    def __init__(self, upstream: str, *, seed: int = 0, port: int = 0) -> None:
        """`upstream`: HOST:PORT of the server; it need not listen yet. `port`: own port; 0: a free one."""
        self._upstream = upstream
        self._port = port
        self._random = random.Random(seed)
        self._connections: set[_Connection] = set()
        self._accepting: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None
        self._is_passing = asyncio.Event()
        self._is_passing.set()
        self.faults = Faults()
        self.address = ""
        """HOST:PORT that clients connect to."""
        self.num_cuts = 0

    @property
    def num_open(self) -> int:
        """Number of connections, half-open ones included."""
        return len(self._connections)

    def cut(self) -> None:
        """Reset every connection now. New ones are accepted."""
        for connection in self._connections:
            connection.cut()
            self.num_cuts += 1

    def drop(self) -> None:
        """Let no data pass in either direction, as if every packet were lost, until `deliver`."""
        self._is_passing.clear()

    def deliver(self) -> None:
        """Pass the data that was held back, and all that comes."""
        self._is_passing.set()

    def leave_half_open(self) -> None:
        """Lose every connection's server side without a word to the client, as a machine that loses its power does."""
        for connection in self._connections:
            connection.lose_server()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)
        host, _, port = self._upstream.rpartition(":")
        try:
            if self.faults.is_refusing:
                raise ConnectionRefusedError
            server_reader, server_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            _reset(writer)
            return
        connection = _Connection(writer, server_writer)
        self._connections.add(connection)
        pumps = (
            asyncio.create_task(self._pass(reader, server_writer)),
            asyncio.create_task(self._pass(server_reader, writer, may_cut=True)),
        )
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if connection.is_half_open:
                await _discard(reader)
            if all(pump.result() for pump in done):
                connection.close()
        finally:
            for pump in pumps:
                pump.cancel()
            self._connections.discard(connection)
            connection.cut()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, may_cut: bool = False) -> bool:
        """Pass data on; return True once the sender has ended the connection, False where it broke or is to be cut."""
        try:
            while piece := await reader.read(_PIECE_BYTES):
                await self._hold(len(piece))
                writer.write(piece)
                await writer.drain()
                if may_cut and self._random.random() < self.faults.cut_share:
                    self.num_cuts += 1
                    return False
        except OSError:
            return False
        return True

    async def _hold(self, num_bytes: int) -> None:
        if self.faults.delay_s:
            await asyncio.sleep(self.faults.delay_s)
        if self.faults.bytes_per_s:
            await asyncio.sleep(num_bytes / self.faults.bytes_per_s)
        await self._is_passing.wait()


async def _discard(reader: asyncio.StreamReader) -> None:
    """Read until the sender ends the connection."""
    with contextlib.suppress(OSError):
        while await reader.read(_PIECE_BYTES):
            pass


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a TCP reset, unless it is closed already; what was written may be lost."""
    if writer.transport.is_closing():
        return
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
