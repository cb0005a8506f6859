"""Conformance of every replica registry to the contract in `specdec.state.store`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import Unavailable
from specdec.state.connection import RedisConnection
from specdec.state.key_names import replica_keys
from specdec.state.live_coordinators import COORDINATOR, coordinator_info, live_coordinators
from specdec.state.redis_store import open_registry
from specdec.state.registry import Heartbeat
from specdec.state.replica_records import MAX_RECORD_BYTES, MAX_REPLICA_ID_BYTES
from specdec.state.store import ReplicaRecord, ReplicaRegistry
from tests.support.redis_fixture import RedisServer

LONG_TTL_S = 60.0
SHORT_TTL_S = 0.05

ENGINE = EngineInfo(
    version="1",
    role="draft",
    pool="default",
    replica_id="d-1",
    model="model",
    model_fingerprint="m",
    vocabulary_fingerprint="v",
    vocabulary_size=100,
    max_context_tokens=64,
    eos_token_ids=(2, 3),
    max_gamma=8,
    num_kv_blocks=10,
    kv_block_tokens=16,
    kv_usage=0.25,
    num_sessions=3,
    draining=False,
    dtype="float32",
    device="cpu",
)


def replica(replica_id: str, role: str = "draft") -> ReplicaRecord:
    return ReplicaRecord(f"127.0.0.1:{len(replica_id)}", replace(ENGINE, replica_id=replica_id, role=role))


@pytest.fixture
async def raw(store_url: str) -> AsyncIterator[RedisConnection]:
    connection = RedisConnection(store_url)
    yield connection
    await connection.close()


@pytest.fixture
async def registry(store_url: str, raw: RedisConnection) -> AsyncIterator[ReplicaRegistry]:
    """Return an empty registry; earlier tests use the same names on the server."""
    await raw.run_command("DEL", *replica_keys("draft"))
    await raw.run_command("DEL", *replica_keys("target"))
    await raw.run_command("DEL", *replica_keys(COORDINATOR))
    registry = open_registry(store_url)
    yield registry
    await registry.close()


async def ids(registry: ReplicaRegistry, role: str = "draft") -> list[str]:
    return [record.engine.replica_id for record in await registry.replicas(role)]


async def test_published_replicas_are_listed_by_role_in_order_of_id(registry: ReplicaRegistry) -> None:
    for record in (replica("d-2"), replica("d-10"), replica("d-1"), replica("t-1", "target")):
        await registry.publish(record, ttl_s=LONG_TTL_S)
    assert await ids(registry) == ["d-1", "d-10", "d-2"]
    assert await registry.replicas("target") == [replica("t-1", "target")]


async def test_a_later_heartbeat_replaces_the_earlier(registry: ReplicaRegistry) -> None:
    await registry.publish(replica("d-1"), ttl_s=LONG_TTL_S)
    draining = replace(replica("d-1"), engine=replace(ENGINE, draining=True, num_sessions=9))
    await registry.publish(draining, ttl_s=LONG_TTL_S)
    assert await registry.replicas("draft") == [draining]


async def test_a_removed_replica_is_gone_and_may_be_removed_again(registry: ReplicaRegistry) -> None:
    await registry.publish(replica("d-1"), ttl_s=LONG_TTL_S)
    for _ in range(2):
        await registry.remove("d-1")
    assert await ids(registry) == []


async def test_a_replica_expires_after_its_ttl_and_leaves_no_keys(
    registry: ReplicaRegistry, raw: RedisConnection
) -> None:
    await registry.publish(replica("d-1"), ttl_s=LONG_TTL_S)
    await registry.publish(replica("d-2"), ttl_s=SHORT_TTL_S)
    async with asyncio.timeout(10):
        while "d-2" in await ids(registry):
            pass
    assert await ids(registry) == ["d-1"]
    records, expiry = replica_keys("draft")
    assert await raw.run_command("HKEYS", records) == [b"d-1"]
    assert await raw.run_command("ZCARD", expiry) == 1
    assert await raw.run_command("PTTL", records) > 0


async def test_records_of_newer_and_broken_versions_do_not_hide_the_others(
    registry: ReplicaRegistry, raw: RedisConnection
) -> None:
    await registry.publish(replica("d-1"), ttl_s=LONG_TTL_S)
    records, expiry = replica_keys("draft")
    stored = (await raw.run_command("HGET", records, "d-1")).decode()
    newer = stored.replace('"d-1"', '"d-2"').replace('"version"', '"a_field_of_tomorrow":1,"version"')
    broken = {"d-3": "{}", "d-4": "not JSON", "d-5": '{"address": "h:1", "engine": "not an object"}'}
    for replica_id, text in {"d-2": newer, **broken}.items():
        await raw.run_command("HSET", records, replica_id, text)
        await raw.run_command("ZADD", expiry, "+inf", replica_id)
    assert await ids(registry) == ["d-1", "d-2"]


async def hold(raw: RedisConnection, role: str, replica_id: str, text: str) -> None:
    """Store this record as the only one of a role."""
    records, expiry = replica_keys(role)
    await raw.run_command("DEL", records, expiry)
    await raw.run_command("HSET", records, replica_id, text)
    await raw.run_command("ZADD", expiry, "+inf", replica_id)


async def test_an_unreadable_record_is_logged_when_it_appears_or_changes_and_not_at_every_read(
    registry: ReplicaRegistry, raw: RedisConnection, caplog: pytest.LogCaptureFixture
) -> None:
    await registry.publish(replica("d-1"), ttl_s=LONG_TTL_S)
    readable = (await raw.run_command("HGET", replica_keys("draft")[0], "d-1")).decode()
    num_told = []
    for role, replica_id, text in (
        ("draft", "d-1", "{}"),
        ("draft", "d-1", "{}"),
        ("draft", "d-2", "{}"),
        ("draft", "d-2", "not JSON"),
        ("target", "d-2", "not JSON"),
        ("draft", "d-2", "not JSON"),
        ("target", "d-2", "not JSON"),
        ("draft", "d-1", readable),
        ("draft", "d-2", "not JSON"),
    ):
        await hold(raw, role, replica_id, text)
        caplog.clear()
        assert await ids(registry, role) == (["d-1"] if text == readable else [])
        expected = f"unreadable record of {role} replica '{replica_id}'"
        num_told.append(sum(expected in message for message in caplog.messages))
        assert len(caplog.messages) == num_told[-1]
    assert num_told == [1, 0, 1, 1, 1, 0, 0, 0, 1]


async def test_records_and_ids_may_have_exactly_the_maximum_length(
    registry: ReplicaRegistry, raw: RedisConnection, caplog: pytest.LogCaptureFixture
) -> None:
    await registry.publish(replica("d-1"), ttl_s=LONG_TTL_S)
    records, expiry = replica_keys("draft")
    readable = (await raw.run_command("HGET", records, "d-1")).decode()
    for replica_id, text, is_listed, num_told in (
        ("d" * MAX_REPLICA_ID_BYTES, readable.ljust(MAX_RECORD_BYTES), True, 0),
        ("d", readable.ljust(MAX_RECORD_BYTES + 1), False, 1),
        ("d" * (MAX_REPLICA_ID_BYTES + 1), readable, False, 1),
    ):
        await hold(raw, "draft", replica_id, text)
        caplog.clear()
        assert await ids(registry) == (["d-1"] if is_listed else [])
        assert len(caplog.messages) == num_told
    await registry.publish(replica("d-1"), ttl_s=LONG_TTL_S)
    assert await ids(registry) == ["d-1"]
    await raw.run_command("DEL", records, expiry)


async def test_ids_without_a_record_and_expired_ids_are_not_listed(
    registry: ReplicaRegistry, raw: RedisConnection, caplog: pytest.LogCaptureFixture
) -> None:
    await registry.publish(replica("d-1"), ttl_s=LONG_TTL_S)
    await registry.publish(replica("d-2"), ttl_s=LONG_TTL_S)
    records, expiry = replica_keys("draft")
    await raw.run_command("HDEL", records, "d-2")
    assert await ids(registry) == ["d-1"]
    for _ in range(3):  # a second of the server's clock may have just begun
        seconds, microseconds = map(int, await raw.run_command("TIME"))
        await raw.run_command("ZADD", expiry, seconds * 1000 + microseconds // 1000, "d-1")
        assert await ids(registry) == []
        assert await raw.run_command("ZCARD", expiry) == 1
        await registry.publish(replica("d-1"), ttl_s=LONG_TTL_S)
    assert caplog.messages == []


async def test_a_replica_is_removed_from_either_role_and_leaves_no_keys(
    registry: ReplicaRegistry, raw: RedisConnection
) -> None:
    for role in ("draft", "target"):
        await registry.publish(replica("r-1", role), ttl_s=LONG_TTL_S)
    await registry.remove("r-1")
    for role in ("draft", "target"):
        records, expiry = replica_keys(role)
        assert await ids(registry, role) == []
        assert await raw.run_command("HKEYS", records) == []
        assert await raw.run_command("ZCARD", expiry) == 0


async def test_a_replica_is_listed_for_the_ttl_of_its_heartbeat(
    registry: ReplicaRegistry, raw: RedisConnection
) -> None:
    ttl_ms = 200_000_000  # so long that a factor of 1.001 exceeds any delay of a machine
    records, expiry = replica_keys("draft")
    for published_s in (200_000.0, 1e-6):
        await registry.publish(replica("d-1"), ttl_s=published_s)
        server_s, _ = await raw.run_command("TIME")
        until_ms = float(await raw.run_command("ZSCORE", expiry, "d-1"))
        assert abs(until_ms - int(server_s) * 1000 - published_s * 1000) < 100_000
        for key in (records, expiry):
            assert ttl_ms - 100_000 < await raw.run_command("PTTL", key) <= ttl_ms


async def test_two_registries_share_what_is_published(registry: ReplicaRegistry, store_url: str) -> None:
    other = open_registry(store_url)
    await other.publish(replica("d-1"), ttl_s=LONG_TTL_S)
    assert await ids(registry) == ["d-1"]
    await other.close()


async def test_a_heartbeat_keeps_its_replica_listed_and_removes_it_at_the_end(registry: ReplicaRegistry) -> None:
    sessions = 0

    def describe() -> EngineInfo:
        nonlocal sessions
        sessions += 1
        return replace(ENGINE, num_sessions=sessions)

    async with Heartbeat(registry, address="h:1", describe=describe, ttl_s=2.0), asyncio.timeout(60):
        assert [(record.address, record.engine.num_sessions) for record in await registry.replicas("draft")] == [
            ("h:1", 1)
        ]
        # Five beats take longer than the TTL of the first, which a busy machine does not miss.
        while (await registry.replicas("draft"))[0].engine.num_sessions < 5:
            pass
    assert await ids(registry) == []


async def test_a_heartbeat_continues_after_an_error_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    registry = open_registry("memory://")
    beats = 0

    def describe() -> EngineInfo:
        nonlocal beats
        beats += 1
        if beats == 2:
            raise ZeroDivisionError("a fault of the engine")
        return replace(ENGINE, num_sessions=beats)

    async with Heartbeat(registry, address="h:1", describe=describe, ttl_s=0.3), asyncio.timeout(10):
        while not any(record.engine.num_sessions > 2 for record in await registry.replicas("draft")):
            pass
    assert "a fault of the engine" in caplog.text
    await registry.close()


async def test_a_heartbeat_that_starts_without_redis_logs_it_and_registers_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path)
    registry = open_registry(server.url)
    async with Heartbeat(registry, address="h:1", describe=lambda: ENGINE, ttl_s=0.3), asyncio.timeout(20):
        assert "cannot register yet, trying again: the store at unix:/" in caplog.text
        server.start()
        while await ids(registry) != ["d-1"]:
            pass
    await registry.close()
    server.stop()


async def test_a_heartbeat_survives_a_restart_of_redis(tmp_path_factory: pytest.TempPathFactory) -> None:
    server = RedisServer(tmp_path_factory.mktemp("restarting"))
    server.start()
    registry = open_registry(server.url)
    async with Heartbeat(registry, address="h:1", describe=lambda: ENGINE, ttl_s=0.3), asyncio.timeout(20):
        assert await ids(registry) == ["d-1"]
        server.stop()
        with pytest.raises(Unavailable):
            await registry.replicas("draft")
        server.start()
        while await ids(registry) != ["d-1"]:
            pass
    await registry.close()
    server.stop()


def coordinator(coordinator_id: str, address: str) -> ReplicaRecord:
    info = coordinator_info(coordinator_id, version="1", model="m", vocabulary_fingerprint="v", num_running=2)
    return ReplicaRecord(address, info)


async def test_live_coordinators_are_listed_by_address_and_are_no_replicas(registry: ReplicaRegistry) -> None:
    assert await live_coordinators(registry) == []
    leaving = coordinator("c-3", "h:3")
    leaving = replace(leaving, engine=replace(leaving.engine, draining=True))
    for record in (coordinator("c-1", "h:2"), coordinator("c-2", "h:1"), leaving, replica("d-1")):
        await registry.publish(record, ttl_s=LONG_TTL_S)
    assert await live_coordinators(registry) == ["h:1", "h:2"]
    assert await registry.replicas(COORDINATOR) == [coordinator("c-1", "h:2"), coordinator("c-2", "h:1"), leaving]
    assert [await ids(registry, role) for role in ("draft", "target")] == [["d-1"], []]
    await registry.remove("c-2")
    assert await live_coordinators(registry) == ["h:2"]


async def test_a_coordinator_that_sends_no_heartbeat_is_not_listed_for_long(registry: ReplicaRegistry) -> None:
    await registry.publish(coordinator("c-1", "h:1"), ttl_s=SHORT_TTL_S)
    await registry.publish(coordinator("c-2", "h:2"), ttl_s=LONG_TTL_S)
    async with asyncio.timeout(10):
        while await live_coordinators(registry) != ["h:2"]:
            pass
