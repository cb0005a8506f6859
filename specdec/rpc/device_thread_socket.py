"""A replica's second Unix socket, which the engine's device thread reads: a call and its answer wake no other thread.

The service's event loop accepts and aborts connections; the device thread's event loop reads and writes them. That loop
stands still while a step runs, which delays nothing, because a call that arrives meanwhile would wait for the device
anyway. While the device hangs, the socket is closed and its callers are disconnected, so that they learn the reason
over the other socket. `specdec.rpc.transport_selector` decides when a caller uses it; connections are served by
`specdec.rpc.unix_socket_server`. Opened by `replica_servicer`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
from typing import Protocol, runtime_checkable

from specdec.contract.engine_api import Engine
from specdec.rpc.ticks import until_tick_s
from specdec.rpc.unix_socket_server import MAX_CONNECTIONS, UnixSocketConnection, UnixSocketHost
from specdec.rpc.unix_sockets import new_name, socket_path

#: Interval of the checks whether the device hangs.
CHECK_INTERVAL_S = 0.5

_log = logging.getLogger(__name__)


@runtime_checkable
class DeviceThreadEngine(Protocol):
    """An engine whose device thread can take calls in an event loop of its own."""

    def share_event_loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the event loop of the device thread, or None if calls cannot be made in it.

        It stands still while a step runs, and is closed when the engine is closed.
        """
        ...


class DeviceThreadSocket:
    """The socket of a device thread; it has another name after each hang. Use from the service's event loop."""

    def __init__(self, engine: Engine, device_loop: asyncio.AbstractEventLoop, host: UnixSocketHost) -> None:
        """
        Args:
            engine: tells whether its device hangs, and when it ends.
            device_loop: the event loop of the engine's device thread.
            host: shared state of the connections in that loop.
        """
        self._engine = engine
        self._device_loop = device_loop
        self._host = host
        self.name = ""
        """The socket's name; "" while none is open."""
        self._accepting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._connections: dict[socket.socket, concurrent.futures.Future[None]] = {}
        """Future per connection, done once the connection has ended or was aborted."""
        self._is_closing = False
        self._has_failed = False

    def open(self) -> None:
        """Accept connections until `close`, except while the device hangs."""
        self._listen()
        self._watching = asyncio.create_task(self._watch_device(), name="device-thread socket")

    async def close(self, grace_s: float) -> None:
        """Accept no more connections, give open ones of a draining service `grace_s`, abort the others. Idempotent."""
        self._is_closing = True
        self._stop_listening()
        open_ones = [asyncio.wrap_future(ended) for ended in list(self._connections.values())]
        if open_ones and grace_s > 0.0:
            await asyncio.wait(open_ones, timeout=grace_s)
        if self._watching is not None:
            self._watching.cancel()
        self._abort_connections()

    async def _watch_device(self) -> None:
        """Keep the socket open while the device works, and closed while it hangs."""
        ended = asyncio.create_task(self._engine.wait_ended())
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=until_tick_s(CHECK_INTERVAL_S))
                if ended.done() or self._engine.is_stalled:
                    self._stop_listening()
                    self._abort_connections()
                elif not (self.name or self._is_closing):
                    self._listen()
        finally:
            ended.cancel()
            await asyncio.wait({ended})
            if not ended.cancelled():
                ended.exception()  # `specdec.service.lifecycle` reports it

    def _listen(self) -> None:
        name = new_name()
        if not name:
            return
        try:
            listener = _listener(name)
        except OSError as error:
            self._log_failure(error)
            return
        self.name = name
        self._accepting = asyncio.create_task(self._accept(listener))

    def _stop_listening(self) -> None:
        """Close the listening socket; connections that were not accepted yet are closed with it."""
        self.name = ""
        if self._accepting is not None:
            self._accepting.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            try:
                while True:
                    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                    self._hand_over(connection)
            except OSError as error:
                self.name = ""  # `_watch_device` opens another one
                self._log_failure(error)

    def _log_failure(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.warning("cannot open the device-thread socket: %s", error)

    def _hand_over(self, connection: socket.socket) -> None:
        """Let the device thread's event loop serve a connection."""
        if len(self._connections) >= MAX_CONNECTIONS:
            connection.close()
            return
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._connections[connection] = ended
        ended.add_done_callback(lambda _: self._connections.pop(connection, None))

        def serve() -> UnixSocketConnection:
            served = UnixSocketConnection(self._host)
            served.over.add_done_callback(lambda _: _set_done(ended))
            return served

        serving = self._device_loop.connect_accepted_socket(serve, connection)
        try:
            asyncio.run_coroutine_threadsafe(serving, self._device_loop)
        except RuntimeError:  # the device thread has ended
            serving.close()
            connection.close()
            _set_done(ended)

    def _abort_connections(self) -> None:
        """Shut the sockets down from this thread, even if the device thread hangs; it then finds them closed."""
        for connection, ended in list(self._connections.items()):
            with contextlib.suppress(OSError):  # the other end has closed it already
                connection.shutdown(socket.SHUT_RDWR)
            _set_done(ended)


def _listener(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(socket_path(name))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _set_done(ended: concurrent.futures.Future[None]) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # both threads may set it
        ended.set_result(None)
