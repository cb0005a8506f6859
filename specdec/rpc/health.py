"""The health service of a process: whether its services take calls, and whether the process itself lives.

The names of the services, and "", report readiness: SERVING while calls are taken. The name `LIVENESS` reports whether
the process can still work: it is SERVING from the start, also while a model loads or while the process drains, and
NOT_SERVING once the event loop has not turned for `MAX_LOOP_PAUSE_S`, or once `note_device` has told that a device is
lost. An orchestrator that sees it fail, or that gets no answer, restarts the process.

    health = Health((DRAFT_SERVICE,))
    health.open_port("0.0.0.0:50062")   # answers from now on, in threads of its own
    server = ServiceServer("0.0.0.0:50061", health=health)
    ...
    await health.watch_loop()           # until cancelled

The port of `open_port` answers while the event loop does not turn. `ServiceServer` serves the same on its own port.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specdec.contract.errors import Unavailable
from specdec.rpc.channels import call_limits, open_port, require_free
from specdec.rpc.ticks import tick

#: Name under which the health service reports that the process lives.
LIVENESS = "liveness"
#: Time without a turn of the event loop after which the process counts as dead.
MAX_LOOP_PAUSE_S = 10.0

_TURN_INTERVAL_S = 0.5
_NUM_THREADS = 2
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_log = logging.getLogger(__name__)


class Health:
    """Health of one process. Everything but `open_port` and `close_port` is called in the event loop."""

    def __init__(self, service_names: Sequence[str]) -> None:
        """`service_names` are the full protobuf names of the services that it reports on."""
        self.service_names = tuple(service_names)
        self.is_serving = False
        """True while the services report SERVING."""
        self.servicer = _LoopServicer()
        """Servicer for the server of the event loop."""
        self._thread_servicer = health.HealthServicer()
        self._port: grpc.Server | None = None
        self._is_ended = False
        self._has_device = True
        self._loop_turns = True
        for name in ("", *self.service_names):
            self._thread_servicer.set(name, _NOT_SERVING)
        self._thread_servicer.set(LIVENESS, _SERVING)

    def open_port(self, address: str) -> None:
        """Serve health alone, in plaintext, at HOST:PORT. Raises Unavailable if the address cannot be bound."""
        require_free(address)
        self._port = grpc.server(
            ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="health"),
            interceptors=[_Refusals()],
            options=(("grpc.so_reuseport", 0), *call_limits()),
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._thread_servicer, self._port)
        try:
            open_port(self._port, address)
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {address}") from error
        self._port.start()

    def close_port(self) -> None:
        """Close the port of `open_port`, if it is open."""
        if self._port is not None:
            self._port.stop(None)

    async def start(self) -> None:
        """Prepare `servicer`, before its server starts."""
        await self.set_serving(self.is_serving)
        await self._tell_liveness()

    async def set_serving(self, is_serving: bool) -> None:
        """Report whether the services take calls. Without effect after `end`."""
        if self._is_ended:
            return
        self.is_serving = is_serving
        for name in ("", *self.service_names):
            await self._set(name, _SERVING if is_serving else _NOT_SERVING)

    async def end(self) -> None:
        """Report NOT_SERVING from now on, and end the calls that watch. The process still reports that it lives."""
        await self.set_serving(False)
        self._is_ended = True
        self.servicer.end_watches()

    async def note_device(self, is_usable: bool) -> None:
        """Note whether the device that the process needs can come back by itself; if not, the process must restart."""
        self._has_device = is_usable
        await self._tell_liveness()

    async def watch_loop(self) -> None:
        """Report whether the running event loop turns, until cancelled."""
        turns, ended = _Turns(), threading.Event()
        threading.Thread(target=self._watch, args=(turns, ended), name="specdec-liveness", daemon=True).start()
        try:
            while True:
                turns.count += 1
                if not self._loop_turns:
                    self._loop_turns = True
                    _log.warning("event loop turns again")
                    await self._tell_liveness()
                await tick(_TURN_INTERVAL_S)
        finally:
            ended.set()

    def _watch(self, turns: _Turns, ended: threading.Event) -> None:
        """Compare numbers of turns, not times, so that time in which the whole process stands does not count."""
        seen, num_missed = turns.count, 0
        while not ended.wait(_TURN_INTERVAL_S):
            num_missed = 0 if turns.count != seen else num_missed + 1
            seen = turns.count
            if self._loop_turns and num_missed * _TURN_INTERVAL_S >= MAX_LOOP_PAUSE_S:
                self._thread_servicer.set(LIVENESS, _NOT_SERVING)
                self._loop_turns = False  # afterwards, so that the loop, which then turns again, has the last word
                _log.error("event loop does not turn: liveness fails", extra={"limit_s": MAX_LOOP_PAUSE_S})

    async def _tell_liveness(self) -> None:
        await self._set(LIVENESS, _SERVING if self._has_device and self._loop_turns else _NOT_SERVING)

    async def _set(self, name: str, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        self._thread_servicer.set(name, status)
        await self.servicer.set(name, status)


class _Turns:
    """Number of times that an event loop has turned."""

    def __init__(self) -> None:
        self.count = 0


class _Refusals(grpc.ServerInterceptor):
    """Refuses malformed requests and the method List, for each of which gRPC would log a traceback, and Watch.

    A Watch would occupy one of the threads for as long as its client likes, and Check must always be answered.
    """

    def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        behaviour = handler.unary_unary

        def handle(content: bytes, context: Any) -> Any:
            if behaviour is None:
                context.abort(grpc.StatusCode.UNIMPLEMENTED, "this port answers Check; Watch is served at --listen")
            try:
                request = handler.request_deserializer(content)
            except DecodeError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is malformed: {error}")
            try:
                return behaviour(request, context)
            except NotImplementedError:
                context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not implemented!")

        factory = grpc.unary_unary_rpc_method_handler if behaviour else grpc.unary_stream_rpc_method_handler
        return factory(handle, None, handler.response_serializer)


class _LoopServicer(health.aio.HealthServicer):  # type: ignore[misc]
    """A health service that ends its Watch calls when the server stops; they would last for the whole grace period."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = asyncio.Event()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802
        watch = asyncio.ensure_future(super().Watch(request, context))
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({watch, ended}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
        finally:
            for task in (watch, ended):
                task.cancel()

    def end_watches(self) -> None:
        self._ended.set()
