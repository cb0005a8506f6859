"""A replica's second lane, which the device's own thread reads: no other one is woken for a call, or for its answer.

Callers are taken, and hung up on, by the service's own event loop, and spoken with in the device thread's, which stands
still while a step runs: what comes meanwhile would wait for the device anyhow. One that hangs stands still for long, so
that its callers are hung up on, and find out over the other lane what is wrong. Not here: when a caller uses it
(`client`), what a lane does (`lane_server`). Used by `servicer`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket

from specdec.engine_api import Engine
from specdec.rpc.unix_socket_server import MAX_UNIX_SOCKETS, UnixSocketConnection, UnixSocketHost
from specdec.rpc.unix_sockets import new_name, socket_path

#: Between two looks at whether the device hangs.
LOOK_S = 0.25

_log = logging.getLogger(__name__)


class DeviceThreadSocket:
    """The lane of a device thread, under another name after each hang. Use from the service's event loop."""

    def __init__(self, engine: Engine, device_loop: asyncio.AbstractEventLoop, host: UnixSocketHost) -> None:
        """`device_loop`: of the engine's device thread; `host`: of its lanes."""
        self._engine = engine
        self._device_loop = device_loop
        self._host = host
        self.name = ""
        """As it is told; "" while there is none."""
        self._taker: asyncio.Task[None] | None = None
        self._follower: asyncio.Task[None] | None = None
        self._callers: dict[socket.socket, concurrent.futures.Future[None]] = {}
        """By their sockets: done when one is gone, or hung up on."""
        self._is_closing = False
        self._has_failed = False

    def open(self) -> None:
        """Takes callers until `close`, but for times in which the device hangs."""
        self._listen()
        self._follower = asyncio.create_task(self._follow(), name="device lane")

    async def close(self, grace_s: float) -> None:
        """Takes no more callers, gives those of a draining service so long to end, hangs up on the rest. Idempotent."""
        self._is_closing = True
        self._stop_listening()
        callers = [asyncio.wrap_future(gone) for gone in list(self._callers.values())]
        if callers and grace_s > 0.0:
            await asyncio.wait(callers, timeout=grace_s)
        if self._follower is not None:
            self._follower.cancel()
        self._hang_up()

    async def _follow(self) -> None:
        """There is a lane while the device moves."""
        ended = asyncio.create_task(self._engine.wait_ended())
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=LOOK_S)
                if ended.done() or self._engine.is_stalled:
                    self._stop_listening()
                    self._hang_up()
                elif not (self.name or self._is_closing):
                    self._listen()
        finally:
            ended.cancel()
            await asyncio.wait({ended})
            if not ended.cancelled():
                ended.exception()  # somebody else's to tell

    def _listen(self) -> None:
        name = new_name()
        if not name:
            return
        try:
            listener = _listener(name)
        except OSError as error:
            self._note_failure(error)
            return
        self.name = name
        self._taker = asyncio.create_task(self._take_callers(listener))

    def _stop_listening(self) -> None:
        """Who waits to be taken is hung up on."""
        self.name = ""
        if self._taker is not None:
            self._taker.cancel()

    async def _take_callers(self, listener: socket.socket) -> None:
        with listener:
            try:
                while True:
                    caller, _ = await asyncio.get_running_loop().sock_accept(listener)
                    self._take(caller)
            except OSError as error:
                self.name = ""  # until the next look
                self._note_failure(error)

    def _note_failure(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.warning("no device lane: %s", error)

    def _take(self, caller: socket.socket) -> None:
        if len(self._callers) >= MAX_UNIX_SOCKETS:
            caller.close()
            return
        gone: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._callers[caller] = gone
        gone.add_done_callback(lambda _: self._callers.pop(caller, None))

        def speak() -> UnixSocketConnection:
            lane = UnixSocketConnection(self._host)
            lane.over.add_done_callback(lambda _: _note_gone(gone))
            return lane

        speaking = self._device_loop.connect_accepted_socket(speak, caller)
        try:
            asyncio.run_coroutine_threadsafe(speaking, self._device_loop)
        except RuntimeError:  # the device's thread has ended
            speaking.close()
            caller.close()
            _note_gone(gone)

    def _hang_up(self) -> None:
        """From here, whatever the device's thread does; it finds its ends closed."""
        for caller, gone in list(self._callers.items()):
            with contextlib.suppress(OSError):  # the other end was quicker
                caller.shutdown(socket.SHUT_RDWR)
            _note_gone(gone)


def _listener(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(socket_path(name))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _note_gone(gone: concurrent.futures.Future[None]) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # both threads may see it
        gone.set_result(None)
