"""Counters of ended requests, as an operator reads them from the metrics endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.request import urlopen

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdec.observability.metrics_server import start_metrics_server
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import Coordinator, Rig, eventually, read_until, request, started_coordinator
from tests.support.stack import free_port

ENDED = ("specdec:request_success", "specdec:request_failures", "specdec:request_cancellations")
Counts = dict[tuple[str, str], float]
"""Requests by counter and by its label (reason or cause)."""


def read_counts(port: int) -> Counts:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
    return {
        (family.name, next(value for name, value in sample.labels.items() if name != "model_name")): sample.value
        for family in families
        if family.name in ENDED
        for sample in family.samples
        if sample.name.endswith("_total")
    }


@asynccontextmanager
async def metered() -> AsyncIterator[tuple[Rig, Coordinator, Callable[[], Counts]]]:
    """A coordinator with a metrics endpoint, and a function that reads it."""
    async with started_coordinator() as (rig, coordinator):
        port = free_port()
        stop = start_metrics_server(coordinator.metrics.registry, "127.0.0.1", port)
        try:
            yield rig, coordinator, lambda: read_counts(port)
        finally:
            stop()


async def ended(coordinator: Coordinator) -> None:
    await eventually(lambda: not coordinator.generations.num_running)


async def test_a_stream_that_its_client_cancels_counts_as_cancelled_and_not_as_failed() -> None:
    async with metered() as (_, coordinator, counts):
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=300))
        await read_until(stream, 1)
        stream.cancel()
        await ended(coordinator)
        assert counts() == {("specdec:request_cancellations", "client_left"): 1.0}


async def test_a_request_whose_session_is_deleted_counts_as_cancelled_and_not_as_failed() -> None:
    async with metered() as (_, coordinator, counts):
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=300))
        await read_until(stream, 1)
        await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id="s"))
        await ended(coordinator)
        assert counts() == {("specdec:request_cancellations", "session_deleted"): 1.0}


async def test_requests_that_finish_or_fail_are_not_counted_as_cancelled() -> None:
    async with metered() as (rig, coordinator, counts):
        await coordinator.generate(request(max_new_tokens=4))
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=300))
        await read_until(stream, 1)
        await asyncio.gather(*(service.kill() for service in rig.services))
        with pytest.raises(grpc.aio.AioRpcError):
            await read_until(stream, 300)
        await ended(coordinator)
        assert counts() == {
            ("specdec:request_success", "length"): 1.0,
            ("specdec:request_failures", "REPLICA_UNAVAILABLE"): 1.0,
        }


async def test_a_request_that_a_drain_ends_counts_as_failed() -> None:
    async with metered() as (_, coordinator, counts):
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=300))
        await read_until(stream, 1)
        await coordinator.generations.drain(0.0)
        assert counts() == {("specdec:request_failures", "DRAINING"): 1.0}
