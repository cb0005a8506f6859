"""Invalid records in the registry: a coordinator uses the valid ones, and logs each invalid one once."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest

from coordinator.replicas.pool import ReplicaPools
from specdec.access.service_key import ServiceKey
from specdec.contract.errors import InvalidRequest
from specdec.rpc.client import open_link
from specdec.state.connection import RedisConnection
from specdec.state.key_names import replica_keys
from specdec.state.redis_store import open_registry
from specdec.state.replica_records import CLOCK_TOLERANCE_S, encode_record
from specdec.state.store import ReplicaRecord, ReplicaRegistry
from tests.support.coordinator_rig import TARGET, Rig
from tests.support.redis_fixture import redis_server, redis_url
from tests.support.table_services import Service, start_service

__all__ = ["redis_server", "redis_url"]

#: With a port behind them gRPC takes these for no host's name.
SCHEMES = ("unix", "unix-abstract", "vsock", "ipv4", "ipv6", "dns", "xds", "google-c2p", "XDS")
#: Made from a good record's JSON object; None leaves it as it is.
ADDRESSES = {
    "a lone surrogate": "\ud800:50061",
    "a megabyte": "h" * 1_000_000 + ":50061",
    "a long host": "h" * 300 + ":50061",
    "another scheme": "unix:/run/redis.sock",
    "a resolver": "dns:///example.org:50061",
    **{f"the scheme {name}": f"{name}:1" for name in SCHEMES},
    "no port": "example.org",
    "port 0": "example.org:0",
    "a port too large": "example.org:65536",
    "a port in other digits": "example.org:٥٠٠٦١",
    "a space": "example .org:50061",
    "two lines": "example.org\n:50061",
    "no host": ":50061",
    "half an IPv6 address": "[::1:50061",
    "no IPv6 address": "[xyz]:50061",
    "a number": 50061,
    "nothing": None,
    "a list": ["example.org:50061"],
}
FIELDS: dict[str, Any] = {
    "a count in words": ("num_sessions", "many"),
    "a negative count": ("num_sessions", -1),
    "a count past 64 bits": ("num_sessions", 1 << 70),
    "a truth for a count": ("num_sessions", True),
    "a share that is no number": ("kv_usage", float("nan")),
    "an infinite share": ("kv_usage", float("inf")),
    "a count for a truth": ("draining", 1),
    "a surrogate in a name": ("pool", "\udfff"),
    "a list for a name": ("model", ["m"]),
    "words for ids": ("eos_token_ids", "12"),
    "ids in ids": ("eos_token_ids", [[1]]),
}
TEXTS: dict[str, bytes] = {
    "200,000 brackets": b"[" * 200_000,
    "60,000 brackets": b"[" * 60_000,
    "objects in objects": b'{"address":' * 5_000,
    "a number of 50,000 digits": b"9" * 50_000,
    "no UTF-8": b"\xff\xfe{}",
    "no object": b"[]",
    "nothing": b"",
    "half a record": b'{"address": "h:1"',
    "a megabyte of spaces": b" " * 1_000_000,
}


def bad_records(good: ReplicaRecord) -> dict[str, bytes]:
    """Return invalid records by replica id."""
    engine = {name: getattr(good.engine, name) for name in good.engine.__dataclass_fields__}
    records = dict(TEXTS)
    for name, address in ADDRESSES.items():
        records[f"address: {name}"] = json.dumps({"address": address, "engine": engine}).encode()
    for name, (field, value) in FIELDS.items():
        records[f"engine: {name}"] = json.dumps({"address": "h:1", "engine": {**engine, field: value}}).encode()
    defaults = {field.name for field in fields(good.engine) if field.default is not MISSING}
    for field in engine.keys() - defaults:
        fewer = {name: value for name, value in engine.items() if name != field}
        records[f"without {field}"] = json.dumps({"address": "h:1", "engine": fewer}).encode()
    records["i" * 100_000] = json.dumps({"address": "h:1", "engine": engine}).encode()
    return records


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[RedisConnection]:
    connection = RedisConnection(redis_url)
    for role in ("draft", "target"):
        await connection.run_command("DEL", *replica_keys(role))
    yield connection
    for role in ("draft", "target"):
        await connection.run_command("DEL", *replica_keys(role))
    await connection.close()


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[ReplicaRegistry]:
    registry = open_registry(redis_url)
    yield registry
    await registry.close()


async def store(raw: RedisConnection, role: str, records: dict[str, bytes]) -> None:
    stored, expiry = replica_keys(role)
    for replica_id, text in records.items():
        await raw.run_command("HSET", stored, replica_id, text)
        await raw.run_command("ZADD", expiry, "+inf", replica_id)


async def test_bad_records_are_left_out_and_each_is_logged_once(
    raw: RedisConnection, registry: ReplicaRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig() as rig:
        good = ReplicaRecord(rig.target.address, rig.target.engine.info())
    bad = bad_records(good)
    await registry.publish(good, ttl_s=60.0)
    await store(raw, "target", bad)
    for _ in range(3):
        assert await registry.replicas("target") == [good]
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == len(bad)
    assert len(set(told)) == len(bad)
    assert max(map(len, told)) < 1000
    assert all(message.isprintable() for message in told)

    # One that changes with every beat is the same bad record; one that was gone is told again.
    caplog.clear()
    await store(raw, "target", {"nothing": b"{}"})
    await registry.replicas("target")
    await store(raw, "target", {"nothing": b"{ }"})
    await registry.replicas("target")
    assert len(caplog.records) == 1
    await registry.remove("nothing")
    await registry.replicas("target")
    await store(raw, "target", {"nothing": b"{}"})
    await registry.replicas("target")
    assert len(caplog.records) == 2


async def test_with_a_service_key_only_records_that_it_signed_lately_for_their_role_are_read(
    raw: RedisConnection, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    key, former, stranger = ServiceKey("k" * 32), ServiceKey("f" * 32), ServiceKey("s" * 32)
    signed = open_registry(redis_url, signer=ServiceKey("k" * 32, "f" * 32))
    async with Rig() as rig:
        good = ReplicaRecord(rig.target.address, rig.target.engine.info())
        draft = ReplicaRecord(rig.draft.address, rig.draft.engine.info())

    def text_of(record: ReplicaRecord, signer: ServiceKey | None, ttl_s: float = 10.0) -> bytes:
        return encode_record(record, ttl_s=ttl_s, signer=signer).encode()

    moved = text_of(good, key).replace(good.address.encode(), b"attacker.example:1")
    refused = {
        **bad_records(good),
        "unsigned": text_of(good, None),
        "signed by a stranger": text_of(good, stranger),
        "with another address": moved,
        "without its expiry": json.dumps({**json.loads(text_of(good, key)), "expires_at_s": None}).encode(),
        "prolonged": json.dumps({**json.loads(text_of(good, key)), "expires_at_s": 1e12}).encode(),
        "of another cluster": encode_record(good, ttl_s=10.0, signer=key, cluster="other").encode(),
        "replayed": text_of(good, key, ttl_s=-CLOCK_TOLERANCE_S - 1),
        "of another role": text_of(draft, key),
        "a list of signatures": json.dumps({**json.loads(text_of(good, None)), "signature": ["x"]}).encode(),
    }
    await store(raw, "target", refused)
    assert await signed.replicas("target") == []
    assert len({record.getMessage() for record in caplog.records}) == len(refused)
    assert not any(secret * 32 in caplog.text for secret in "kf")
    await signed.publish(good, ttl_s=60.0)
    await store(raw, "target", {"of the former key": text_of(good, former)})
    assert await signed.replicas("target") == [good, good]
    unlocked = open_registry(redis_url)  # a coordinator of before, which reads no signatures
    assert good in await unlocked.replicas("target")
    for each in (signed, unlocked):
        await each.close()


async def test_a_coordinator_uses_the_replicas_whose_records_are_valid(
    raw: RedisConnection, registry: ReplicaRegistry
) -> None:
    async with Rig() as rig:
        for service in rig.services:
            good = ReplicaRecord(service.address, service.engine.info())
            await registry.publish(good, ttl_s=60.0)
            await store(raw, service.role, bad_records(good))
        pools = ReplicaPools("table", open_link, registry=registry)
        async with asyncio.timeout(60):
            for _ in range(2):
                await pools.poll()
        assert pools.is_ready
        assert sorted(replica.address for replica in pools.all_replicas()) == sorted(
            service.address for service in rig.services
        )
        await pools.close()


def record_of(service: Service) -> ReplicaRecord:
    return ReplicaRecord(service.address, replace(service.servicer.info(), replica_id=service.address))


async def test_replicas_whose_records_are_lost_stay_in_use_while_their_processes_answer(
    registry: ReplicaRegistry,
) -> None:
    """Records are lost when Redis is away for longer than their lifetime, or comes back empty."""
    async with Rig(targets=3) as rig:
        records = [record_of(service) for service in rig.services]
        for record in records:
            await registry.publish(record, ttl_s=60.0)
        pools = ReplicaPools("table", open_link, registry=registry)

        def known() -> list[str]:
            return sorted(replica.address for replica in pools.all_replicas())

        await pools.poll()
        assert known() == sorted(record.address for record in records)
        for record in records:
            await registry.remove(record.engine.replica_id)
        for _ in range(2):
            await pools.poll()
        assert known() == sorted(record.address for record in records)
        assert pools.is_ready

        # One leaves, one dies, one is another process by now: without a record none of them stays in use.
        leaving, dying, replaced = rig.of_role("target")
        leaving.servicer.drain()
        await dying.kill()
        await replaced.kill()
        rig.services.append(await start_service(TARGET, salt=0, listen=replaced.address))
        for _ in range(2):
            await pools.poll()
        assert known() == [rig.draft.address]
        await registry.publish(record_of(rig.services[-1]), ttl_s=60.0)
        await pools.poll()
        assert known() == sorted([rig.draft.address, replaced.address])
        await pools.close()


@pytest.mark.parametrize("address", [value for value in ADDRESSES.values() if isinstance(value, str)])
async def test_a_replica_cannot_publish_an_address_that_cannot_be_dialled(
    registry: ReplicaRegistry, address: str
) -> None:
    async with Rig() as rig:
        info = rig.target.engine.info()
    with pytest.raises(InvalidRequest, match="address"):
        await registry.publish(ReplicaRecord(address, info), ttl_s=60.0)


async def test_a_replica_cannot_publish_a_record_that_readers_would_leave_out(registry: ReplicaRegistry) -> None:
    async with Rig() as rig:
        info = rig.target.engine.info()
    for bad in (replace(info, model="m" * 100_000), replace(info, pool="\ud800"), replace(info, replica_id="i" * 1000)):
        with pytest.raises(InvalidRequest):
            await registry.publish(ReplicaRecord("h:1", bad), ttl_s=60.0)


@pytest.mark.parametrize(
    "address",
    ["localhost:1", "127.0.0.1:65535", "[::1]:50061", "[fe80::1%eth0]:1", "draft_1.my-ns.svc.cluster.local:80"],
)
async def test_ordinary_addresses_are_published_and_read(
    raw: RedisConnection, registry: ReplicaRegistry, address: str
) -> None:
    async with Rig() as rig:
        record = ReplicaRecord(address, rig.target.engine.info())
    await registry.publish(record, ttl_s=60.0)
    assert await registry.replicas("target") == [record]
