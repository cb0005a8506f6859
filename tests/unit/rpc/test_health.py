"""The liveness of a process, asked over gRPC while its event loop stands and after it turns again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.rpc import health
from specdec.rpc.health import LIVENESS, Health
from specdec.rpc.service_server import DRAFT_SERVICE, ServiceServer
from tests.support.stack import free_port

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def status(address: str, name: str = LIVENESS) -> int:
    """Ask as a probe of Kubernetes does: with a connection of its own."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=10.0).status)


def wait_alive(address: str) -> None:
    while status(address) != SERVING:
        time.sleep(0.05)


async def test_liveness_fails_while_the_loop_stands_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_LOOP_PAUSE_S", 1.0)
    address, found, seen = f"127.0.0.1:{free_port()}", threading.Event(), []

    def probe() -> None:
        while not found.is_set():
            seen.append((status(address), status(address, DRAFT_SERVICE)))
            if seen[-1][0] == NOT_SERVING:
                found.set()

    process = Health((DRAFT_SERVICE,))
    process.open_port(address)
    await process.start()
    await process.set_serving(True)
    watch = asyncio.create_task(process.watch_loop())
    await asyncio.sleep(0.1)
    prober = threading.Thread(target=probe)
    prober.start()
    assert found.wait(60.0)  # the test stands in the event loop
    prober.join()
    assert seen[0] == (SERVING, SERVING)
    assert seen[-1] == (NOT_SERVING, SERVING)
    await asyncio.to_thread(wait_alive, address)
    watch.cancel()
    await asyncio.wait([watch])
    process.close_port()


async def test_a_process_lives_before_it_serves_and_while_it_drains() -> None:
    address = f"127.0.0.1:{free_port()}"
    process = Health((DRAFT_SERVICE,))
    process.open_port(address)
    assert (status(address), status(address, DRAFT_SERVICE)) == (SERVING, NOT_SERVING)
    server = ServiceServer("127.0.0.1:0", health=process)
    await server.start()
    await server.set_serving()
    assert status(address, DRAFT_SERVICE) == SERVING
    await process.end()
    for asked in (address, server.address):
        assert await asyncio.to_thread(status, asked) == SERVING
        assert await asyncio.to_thread(status, asked, DRAFT_SERVICE) == NOT_SERVING
    await server.set_serving()  # too late: the process ends
    assert status(address, DRAFT_SERVICE) == NOT_SERVING
    await server.stop(0)
    process.close_port()


async def test_probes_are_answered_while_the_loop_is_busy_for_less_than_the_limit() -> None:
    address = f"127.0.0.1:{free_port()}"
    process = Health(())
    process.open_port(address)
    watch = asyncio.create_task(process.watch_loop())
    await asyncio.sleep(0.1)
    answers: list[int] = []
    prober = threading.Thread(target=lambda: answers.extend(status(address) for _ in range(3)))
    prober.start()
    time.sleep(1.0)  # noqa: ASYNC251 - the loop must stand
    prober.join()
    assert answers == [SERVING] * 3
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch
    process.close_port()
