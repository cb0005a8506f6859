"""The life cycle of a replica in one process with a registry: warm-up, registration, drain, shutdown."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import uuid
from functools import partial

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.servicer import DraftServicer
from specdec.contract import errors
from specdec.contract.types import ProposeRequest
from specdec.observability.engine_metrics import EngineMetrics
from specdec.rpc.client import DraftLink
from specdec.rpc.health import LIVENESS
from specdec.rpc.service_server import DRAFT_SERVICE
from specdec.service.lifecycle import require_addresses, run_replica, run_to_exit_code
from specdec.settings.draft import DraftSettings
from specdec.state.redis_store import open_registry
from specdec.state.registry import Heartbeat
from specdec.state.store import ReplicaRecord, ReplicaRegistry
from tests.support.arithmetic_engines import ArithmeticDraft, make_round


class Replica:
    """`run_replica` as a task, with a registry in memory."""

    def __init__(self, registry: ReplicaRegistry | None, **settings: object) -> None:
        self.registry = registry
        self.engine = ArithmeticDraft()
        self.stop = asyncio.Event()
        metrics = EngineMetrics("arithmetic", role="draft")
        servicer = DraftServicer(self.engine, metrics)
        options = {"model": "m", "listen": "127.0.0.1:0", "redis_url": "memory://", **settings}
        self.task = asyncio.create_task(
            run_replica(
                DraftSettings(**options),
                service_name=DRAFT_SERVICE,
                engine=self.engine,
                servicer=servicer,
                metrics=metrics,
                register=partial(Heartbeat, registry, describe=servicer.info) if registry is not None else None,
                take_signals=lambda: self.stop,
            )
        )

    async def record(self) -> ReplicaRecord:
        """Wait for the replica's registry entry and return it."""
        assert self.registry is not None
        while not (records := await self.registry.replicas("draft")):
            await asyncio.wait([self.task], timeout=0.01)
            assert not self.task.done()
        return records[0]


@pytest.fixture
def registry() -> ReplicaRegistry:
    return open_registry(f"memory://{uuid.uuid4().hex}")


async def health(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=DRAFT_SERVICE))
        return int(reply.status)


async def test_a_replica_registers_only_once_it_is_warm_and_serving(registry: ReplicaRegistry) -> None:
    replica = Replica(registry)
    record = await replica.record()
    assert replica.engine.asked["warm-up"].is_set()
    assert await health(record.address) == health_pb2.HealthCheckResponse.SERVING
    assert record.engine.replica_id == "draft-1"
    replica.stop.set()
    await replica.task


async def test_a_drain_finishes_calls_in_flight_and_then_leaves_the_registry(registry: ReplicaRegistry) -> None:
    replica = Replica(registry, drain_grace_s=60.0)
    link = DraftLink((await replica.record()).address)
    in_flight = asyncio.create_task(link.propose(ProposeRequest(make_round("hold"), 2)))
    await replica.engine.asked["hold"].wait()
    replica.stop.set()
    while not (await replica.record()).engine.draining:
        await asyncio.wait([replica.task], timeout=0.01)
    assert not replica.task.done()
    replica.engine.release_held.set()
    assert (await in_flight).draft_token_ids.tolist() == [3, 4]
    await replica.task
    assert await registry.replicas("draft") == []
    assert replica.engine.given_up["closed"].is_set()
    await link.close()


async def test_a_replica_that_is_told_to_drain_says_so_answers_on_and_can_be_taken_back(
    registry: ReplicaRegistry,
) -> None:
    replica = Replica(registry)
    record = await replica.record()
    link = DraftLink(record.address)
    assert await link.set_draining(True) == (0, 0)
    assert await health(record.address) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await replica.record()).engine.draining
    assert (await link.propose(ProposeRequest(make_round("s"), 2))).draft_token_ids.tolist() == [3, 4]
    await link.set_draining(False)
    assert await health(record.address) == health_pb2.HealthCheckResponse.SERVING
    assert not (await replica.record()).engine.draining
    replica.stop.set()
    await replica.task
    await link.close()


async def test_calls_that_outlast_the_grace_period_are_cancelled(registry: ReplicaRegistry) -> None:
    replica = Replica(registry, drain_grace_s=0.05)
    link = DraftLink((await replica.record()).address)
    stuck = asyncio.create_task(link.propose(ProposeRequest(make_round("hold"), 2)))
    await replica.engine.asked["hold"].wait()
    replica.stop.set()
    await replica.task
    with pytest.raises(errors.Unavailable):
        await stuck
    assert replica.engine.given_up["hold"].is_set()
    await link.close()


async def test_an_engine_that_fails_ends_the_replica_which_leaves_the_registry(registry: ReplicaRegistry) -> None:
    replica = Replica(registry)
    address = (await replica.record()).address
    async with grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=DRAFT_SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        replica.engine.broken.set()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(errors.Internal, match="the engine broke down"):
            await replica.task
    assert await registry.replicas("draft") == []
    assert replica.engine.given_up["closed"].is_set()


async def test_a_replica_serves_without_its_registry_and_shuts_down_in_order(caplog: pytest.LogCaptureFixture) -> None:
    """Loading the model took long, and coordinators may know the address without a registry."""
    caplog.set_level(logging.INFO)
    replica = Replica(open_registry("redis://127.0.0.1:1"))
    async with asyncio.timeout(20):
        while "listening" not in [record.message for record in caplog.records]:
            await asyncio.wait([replica.task], timeout=0.01)
        assert "cannot register yet, trying again: the store at redis://127.0.0.1:1" in caplog.text
        replica.stop.set()
        await replica.task
    assert replica.engine.given_up["closed"].is_set()


async def test_a_port_in_use_is_detected_before_the_model_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    replica = Replica(None)
    while not (records := [record for record in caplog.records if record.message == "listening"]):
        await asyncio.wait([replica.task], timeout=0.01)
    taken = records[0].__dict__["address"]
    for name in ("listen", "health", "metrics"):
        settings = {"listen": "127.0.0.1:0", name: taken}
        with pytest.raises(errors.Unavailable, match=taken):
            require_addresses(DraftSettings(model="m", **settings))
    replica.stop.set()
    await replica.task


def test_an_error_of_the_tree_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    async def fail() -> None:
        raise errors.InvalidRequest("no model\nat /nope")

    async def succeed() -> None:
        return None

    assert run_to_exit_code(succeed()) == 0
    assert run_to_exit_code(fail()) == 1
    assert capsys.readouterr().err == "error: no model at /nope (INVALID_REQUEST)\n"


def test_a_process_ends_without_teardown_but_flushes_its_output() -> None:
    code = """
import atexit, sys
from specdec.service.lifecycle import end_process
atexit.register(print, "teardown")
print("said")
end_process(3)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (3, "said\n", "")


async def test_a_device_that_does_not_come_back_fails_liveness_until_it_does(
    registry: ReplicaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.service.lifecycle._NUM_GIVE_UP", 3)
    replica = Replica(registry)
    address = (await replica.record()).address
    async with grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=LIVENESS))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        replica.engine.is_stalled = True
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        replica.engine.is_stalled = False
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
    replica.stop.set()
    await replica.task
