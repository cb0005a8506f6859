"""The life cycle of a replica process: warm up, set SERVING, register, and on request drain and shut down.

Draft and target services differ only in engine and servicer; this module runs the common part. `replica_main` and the
coordinator's `__main__` build the parts and read the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NoReturn, Protocol

import grpc

from specdec.contract.engine_api import Engine, EngineInfo
from specdec.contract.errors import InvalidSetting, SpecdecError, error_line
from specdec.observability.engine_metrics import EngineMetrics
from specdec.rpc.channels import require_free
from specdec.rpc.health import Health
from specdec.rpc.open_turns import OpenTurns
from specdec.rpc.service_server import ServiceServer
from specdec.rpc.ticks import tick
from specdec.service import memory
from specdec.service.model_grace import ModelGrace
from specdec.settings.addresses import advertised_address
from specdec.settings.shared import ReplicaSettings, ServiceSettings
from specdec.settings.standard_streams import flush_outputs

#: Interval of the checks whether the device hangs.
_DEVICE_CHECK_INTERVAL_S = 0.5
#: Time for which a device may hang beyond its step's limit before the process counts as dead.
_GIVE_UP_S = 60.0
_NUM_GIVE_UP = int(_GIVE_UP_S / _DEVICE_CHECK_INTERVAL_S)

_log = logging.getLogger(__name__)


class Servicer(Protocol):
    """The gRPC service in front of an engine."""

    open_turns: OpenTurns
    on_leaving: Callable[[bool], Awaitable[None]] | None

    def add_to(self, server: grpc.aio.Server) -> None: ...

    def info(self) -> EngineInfo:
        """Return the replica's description, with `draining`."""
        ...

    def leave(self) -> None:
        """Say draining, and answer all calls until `drain`."""
        ...

    def drain(self) -> None: ...

    async def open_unix_socket(self, max_frame_bytes: int) -> None: ...

    async def close_unix_socket(self, grace_s: float) -> None: ...


class Registration(Protocol):
    """The replica's entry in the registry (`specdec.state.registry.Heartbeat`)."""

    async def start(self) -> None: ...

    async def beat(self) -> None: ...

    async def close(self) -> None: ...


class Register(Protocol):
    """Returns the registration of an address, not started yet."""

    def __call__(self, *, address: str) -> Registration: ...


def require_addresses(settings: ServiceSettings) -> None:
    """Check, before work that takes long, that every address of the settings can be bound.

    Raises:
        Unavailable: an address cannot be bound.
    """
    for address in (settings.listen, settings.health, settings.metrics):
        if address:
            require_free(address)


async def run_replica(
    settings: ReplicaSettings,
    *,
    service_name: str,
    engine: Engine,
    servicer: Servicer,
    metrics: EngineMetrics,
    register: Register | None,
    take_signals: Callable[[], asyncio.Event],
    health: Health | None = None,
    note_serving: Callable[[], None] | None = None,
    check_caller: Callable[[str, Any], None] | None = None,
    grace: ModelGrace | None = None,
) -> None:
    """Serve until a signal, then finish the calls in flight within `settings.drain_grace_s`.

    An engine that fails ends the replica at once, because a process that can answer nothing should be restarted. While
    the device hangs, health is NOT_SERVING; the process stays, because the device may continue. After `_GIVE_UP_S` of
    it, liveness is NOT_SERVING too, so that the process is restarted.

    Args:
        settings: the process's settings.
        service_name: full protobuf name of the service.
        engine: closed on every return, also after an error.
        servicer: the service in front of `engine`.
        metrics: reads the state of `engine` from now on.
        register: None for a replica that is not in a registry.
        take_signals: called once the engine is warm; returns an event that signals set from then on. Before, they end
            the process at once.
        health: health of the process; None: one of this replica alone.
        note_serving: called once the replica accepts calls.
        check_caller: refuses callers that may not call a replica; None: every caller is answered.
        grace: waits, after the signal, for the turns that need this replica; None: there is no such wait.

    Raises:
        Unavailable: the address is in use.
        Internal: the engine failed.
    """
    server = ServiceServer(
        settings.listen,
        health=health or Health((service_name,)),
        max_message_bytes=settings.max_message_bytes,
        tls=settings.server_tls,
        demands_client_certificate=bool(settings.tls_ca),
        check_caller=check_caller,
    )
    servicer.add_to(server.grpc_server)
    async with AsyncExitStack() as ending:
        ending.push_async_callback(engine.close)
        metrics.watch_engine(engine.stats, servicer.info)
        await server.start()
        ending.push_async_callback(server.stop, 0.0)
        ending.push_async_callback(_end_task, asyncio.create_task(server.health.watch_loop()))
        _log.info("warming up")
        metrics.note_phase("warming_up")
        await engine.warm_up()
        await asyncio.to_thread(memory.return_freed_memory)  # a large tokenizer leaves a hundred megabytes
        stop = take_signals()
        if settings.unix_socket == "on":
            await servicer.open_unix_socket(settings.max_message_bytes)
            ending.push_async_callback(servicer.close_unix_socket, 0.0)
        address = advertised_address(settings.advertise, settings.listen, server.port)
        await server.set_serving()
        registration = register(address=address) if register is not None else None
        if registration is not None:
            await registration.start()
            ending.push_async_callback(registration.close)
        _log.info("listening", extra={"address": server.address, "advertised": address})
        metrics.note_phase("serving")
        if note_serving is not None:
            note_serving()
        servicer.on_leaving = partial(_show_leaving, engine, server, registration)
        device_watch = asyncio.create_task(_watch_device(engine, servicer, server, registration))
        try:
            await _until(stop.wait(), engine)
            servicer.on_leaving = None
            if grace is not None:
                await server.set_not_serving()
                servicer.leave()
                await _announce(registration)
                await _until(grace.wait(), engine)
        finally:
            await _end_task(device_watch)
            await server.set_not_serving()
        _log.info("draining", extra={"grace_s": settings.drain_grace_s})
        servicer.drain()
        await _announce(registration)
        await asyncio.gather(server.stop(settings.drain_grace_s), servicer.close_unix_socket(settings.drain_grace_s))
    _log.info("stopped")


async def _until(awaited: Coroutine[Any, Any, Any], engine: Engine) -> None:
    """Wait for the end of a coroutine. Raises Internal if the engine fails first."""
    stopper, watcher = asyncio.create_task(awaited), asyncio.create_task(engine.wait_ended())
    try:
        done, _ = await asyncio.wait({stopper, watcher}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (stopper, watcher):
            task.cancel()
        await asyncio.wait({stopper, watcher})


async def _show_leaving(
    engine: Engine, server: ServiceServer, registration: Registration | None, is_leaving: bool
) -> None:
    """Show in health and registry that the replica takes no new sessions, or takes them again."""
    _log.info("taking no new sessions" if is_leaving else "taking new sessions again")
    await (server.set_not_serving() if is_leaving or engine.is_stalled else server.set_serving())
    await _announce(registration)


async def _watch_device(
    engine: Engine, servicer: Servicer, server: ServiceServer, registration: Registration | None
) -> None:
    """Set NOT_SERVING while the engine's device hangs and SERVING afterwards, until cancelled.

    The time of a hang is measured in checks, so that time in which the whole process stands does not count.
    """
    was_stalled, num_stalled = False, 0
    while True:
        await tick(_DEVICE_CHECK_INTERVAL_S)
        num_stalled = num_stalled + 1 if engine.is_stalled else 0
        if num_stalled == _NUM_GIVE_UP:
            _log.error("device does not come back: liveness fails", extra={"limit_s": _GIVE_UP_S})
            await server.health.note_device(False)
        if engine.is_stalled != was_stalled:
            was_stalled = not was_stalled
            is_ready = not was_stalled and not servicer.info().draining
            await (server.set_serving() if is_ready else server.set_not_serving())
            if not was_stalled:
                await server.health.note_device(True)
            await _announce(registration)


async def _end_task(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def _announce(registration: Registration | None) -> None:
    """Publish the replica's state at once, so that coordinators do not wait for the next heartbeat."""
    if registration is not None:
        try:
            await registration.beat()
        except SpecdecError as error:
            _log.warning("cannot publish the replica's state, trying again at the next heartbeat: %s", error)


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set instead of ending the process. Call it in the event loop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def run_to_exit_code(service: Coroutine[Any, Any, None]) -> int:
    """Run a service's coroutine in a new event loop; return the process's exit code.

    An error of the tree is one line on stderr and code 1, or 2 for InvalidSetting; an interrupt before the service
    handles signals is 130.
    """
    try:
        asyncio.run(service)
    except SpecdecError as error:
        print(error_line(error), file=sys.stderr)
        return 2 if isinstance(error, InvalidSetting) else 1
    except KeyboardInterrupt:
        return 130
    return 0


def end_process(exit_code: int) -> NoReturn:
    """End the process at once after a service has returned and closed everything.

    The regular end of an interpreter that has loaded torch takes seconds, for which a supervisor would wait.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader is gone
            stream.flush()
    flush_outputs()
    os._exit(exit_code)
