"""A coordinator that uses a registry is found there while it serves, and no replica pool takes it for a replica."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coordinator.replicas.pool import ReplicaPools
from specdec.rpc.client import open_link
from specdec.state.live_coordinators import coordinator_info, live_coordinators
from specdec.state.redis_store import open_registry
from specdec.state.store import ReplicaRecord, ReplicaRegistry
from tests.support.coordinator_rig import Rig
from tests.support.redis_fixture import RedisServer
from tests.support.stack import free_port
from tests.support.table_services import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Return a Redis of its own: other tests register coordinators too."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def registry(server: RedisServer) -> AsyncIterator[ReplicaRegistry]:
    registry = open_registry(server.url)
    yield registry
    await registry.close()


async def test_a_coordinator_registers_its_advertised_address_and_is_removed_when_it_drains(
    server: RedisServer, registry: ReplicaRegistry, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    listen, advertised = f"127.0.0.1:{free_port()}", "coordinator.example:50051"
    flags = ["--listen", listen, "--advertise", advertised, "--tokenizer", str(tmp_path), "--redis-url", server.url]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator", *flags, cwd=ROOT, stdout=DEVNULL, stderr=PIPE
    )
    try:
        async with asyncio.timeout(120):
            while await live_coordinators(registry) != [advertised]:
                assert process.returncode is None, await process.stderr.read()
                await asyncio.sleep(0.05)
            (record,) = await registry.replicas("coordinator")
            assert (record.engine.role, record.engine.num_running) == ("coordinator", 0)
            process.terminate()
            _, log = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, b"Traceback" in log) == (0, False), log
    assert await registry.replicas("coordinator") == []  # long before the record would have expired


async def test_replica_pools_ignore_registered_coordinators(server: RedisServer, registry: ReplicaRegistry) -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        info = coordinator_info("c-1", version="1", model="m", vocabulary_fingerprint="table", num_running=0)
        await registry.publish(ReplicaRecord(coordinator.server.address, info), ttl_s=600.0)
        for service in rig.services:
            await registry.publish(ReplicaRecord(service.address, service.servicer.info()), ttl_s=600.0)
        pools = ReplicaPools("table", open_link, registry=registry)
        while sum(replica.is_alive for replica in pools.all_replicas()) < len(rig.services):
            await pools.poll()
        assert {replica.address for replica in pools.all_replicas()} == {service.address for service in rig.services}
        assert await live_coordinators(registry) == [coordinator.server.address]
        await pools.close()
