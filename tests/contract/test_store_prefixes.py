"""Conformance of every directory of prefixes to the contract in `specdec.state.store`."""

from __future__ import annotations

import asyncio
import hashlib
import secrets

import pytest

from specdec.contract.errors import Unavailable
from specdec.state.connection import RedisConnection
from specdec.state.key_names import prefix_keys
from specdec.state.prefix_directory import MAX_HOLDERS, RedisPrefixDirectory
from specdec.state.redis_store import RedisSessionStore, open_store
from specdec.state.store import KvLocation, SessionStore
from tests.support.redis_fixture import RedisServer
from tests.support.store_sessions import LONG_TTL_S, REQUEST, tokens

SHORT_TTL_S = 0.05


def chain(length: int) -> list[bytes]:
    """Return hashes of a chain that no other test uses."""
    seed = secrets.token_bytes(8)
    return [hashlib.blake2b(seed + bytes([index]), digest_size=16).digest() for index in range(length)]


@pytest.fixture
def directory(store: RedisSessionStore) -> RedisPrefixDirectory:
    return store.prefixes()


async def test_noted_holders_are_read_for_each_prefix(directory: RedisPrefixDirectory) -> None:
    hashes = chain(4)
    assert await directory.holders(hashes) == [[], [], [], []]
    await directory.note(hashes[:3], {"deep": 3, "shallow": 1})
    assert [sorted(names) for names in await directory.holders(hashes)] == [["deep", "shallow"], ["deep"], ["deep"], []]
    await directory.note(hashes[:2], {"shallow": 2})
    assert [sorted(names) for names in await directory.holders(hashes)][1] == ["deep", "shallow"]


async def test_a_single_prefix_can_be_read_and_noted_again(directory: RedisPrefixDirectory) -> None:
    hashes = chain(3)
    for _ in range(2):
        await directory.note(hashes, {"a": 3})
    assert await directory.holders([hashes[0], hashes[2]]) == [["a"], ["a"]]


async def test_chains_that_diverge_share_their_common_prefixes(directory: RedisPrefixDirectory) -> None:
    root, left, right = chain(3)
    await directory.note([root, left], {"l": 2})
    await directory.note([root, right], {"r": 2})
    assert [sorted(names) for names in await directory.holders([root, left, right])] == [["l", "r"], ["l"], ["r"]]


async def test_the_latest_holders_stay_and_come_first(directory: RedisPrefixDirectory, raw: RedisConnection) -> None:
    hashes = chain(1)
    names = [f"holder-{index}" for index in range(MAX_HOLDERS + 3)]
    for name in names:
        await directory.note(hashes, {name: 1})
        await asyncio.sleep(0.002)  # the server's clock distinguishes milliseconds
    assert await directory.holders(hashes) == [names[: -MAX_HOLDERS - 1 : -1]]
    assert await raw.run_command("ZCARD", *prefix_keys("default", hashes)) == MAX_HOLDERS


async def test_an_entry_expires_after_its_ttl_and_leaves_no_keys(store_url: str, raw: RedisConnection) -> None:
    short = RedisPrefixDirectory(raw, "default", ttl_s=SHORT_TTL_S)
    hashes = chain(2)
    await short.note(hashes, {"a": 2})
    await asyncio.sleep(4 * SHORT_TTL_S)
    assert await short.holders(hashes) == [[], []]
    for key in prefix_keys("default", hashes):
        assert await raw.run_command("EXISTS", key) == 0


async def test_a_holder_expires_although_other_holders_keep_the_entry(
    raw: RedisConnection,
) -> None:
    short, long = (RedisPrefixDirectory(raw, "default", ttl_s=ttl_s) for ttl_s in (SHORT_TTL_S, LONG_TTL_S))
    hashes = chain(1)
    await short.note(hashes, {"old": 1})
    await long.note(hashes, {"new": 1})
    await asyncio.sleep(4 * SHORT_TTL_S)
    assert await long.holders(hashes) == [["new"]]
    await long.note(hashes, {"newer": 1})
    (key,) = prefix_keys("default", hashes)
    assert await raw.run_command("ZCARD", key) == 2


async def test_tenants_do_not_see_each_others_prefixes(store_url: str) -> None:
    hashes = chain(2)
    stores = [open_store(store_url, tenant=tenant) for tenant in ("ours", "theirs")]
    await stores[0].prefixes().note(hashes, {"a": 2})
    assert await stores[1].prefixes().holders(hashes) == [[], []]
    assert await stores[0].prefixes().holders(hashes) == [["a"], ["a"]]
    for store in stores:
        await store.close()


async def test_invalid_names_of_holders_are_skipped(directory: RedisPrefixDirectory, raw: RedisConnection) -> None:
    hashes = chain(1)
    (key,) = prefix_keys("default", hashes)
    await directory.note(hashes, {"good": 1})
    for name in (b"\xff\xfe", b"x" * 65, b""):
        await raw.run_command("ZADD", key, "9e15", name)
    assert await directory.holders(hashes) == [["good"]]


def test_prefixes_of_a_chain_share_a_slot_and_keys_contain_the_tenant() -> None:
    hashes = chain(5)
    keys = prefix_keys("acme", hashes)
    assert len(set(keys)) == 5
    assert {key.partition("{")[2].partition("}")[0] for key in keys} == {hashes[0].hex()}
    assert all(key.startswith("specdec:acme:prefix:{") for key in keys)


async def test_an_unreachable_directory_is_unavailable(redis_server: RedisServer, tmp_path: object) -> None:
    gone = open_store("unix:///nowhere/redis.sock")
    with pytest.raises(Unavailable):
        await gone.prefixes().holders(chain(1))
    with pytest.raises(Unavailable):
        await gone.prefixes().note(chain(1), {"a": 1})
    await gone.close()


# ---- KV locations of a session --------------------------------------------------------------------------------------


async def test_kv_locations_are_read_with_the_sessions_record(store: SessionStore, session_id: str) -> None:
    lease = await store.acquire(session_id, owner="a", ttl_s=LONG_TTL_S, create=True)
    await store.begin_request(lease, REQUEST, keep=0, token_ids=tokens(1, 2, 3))
    record = await store.load(session_id)
    assert record is not None
    assert record.locations == ()
    locations = (KvLocation("0123abcd", 17), KvLocation("fedc", 3))
    await store.release(lease, locations=locations)
    record = await store.load(session_id)
    assert record is not None
    assert record.locations == locations


async def test_a_release_without_kv_locations_keeps_the_stored_ones(store: SessionStore, session_id: str) -> None:
    locations = (KvLocation("0123abcd", 17),)
    lease = await store.acquire(session_id, owner="a", ttl_s=LONG_TTL_S, create=True)
    await store.release(lease, locations=locations)
    lease = await store.acquire(session_id, owner="b", ttl_s=LONG_TTL_S, create=False)
    await store.release(lease)
    record = await store.load(session_id)
    assert record is not None
    assert record.locations == locations


async def test_a_release_of_a_lost_lease_stores_no_kv_locations(store: SessionStore, session_id: str) -> None:
    old = await store.acquire(session_id, owner="a", ttl_s=LONG_TTL_S, create=True)
    await store.acquire(session_id, owner="a", ttl_s=LONG_TTL_S, create=False)
    await store.release(old, locations=[KvLocation("0123abcd", 17)])
    record = await store.load(session_id)
    assert record is not None
    assert record.locations == ()


@pytest.mark.parametrize("text", ["", " ", "abc", ":5", "a:", "a:-1", "a:x", "a:99999999999999999999", "a:\u0663"])
async def test_invalid_kv_locations_are_skipped(
    store: SessionStore, raw: RedisConnection, session_id: str, text: str
) -> None:
    lease = await store.acquire(session_id, owner="a", ttl_s=LONG_TTL_S, create=True)
    await raw.run_command("HSET", f"specdec:default:{{{session_id}}}:meta", "homes", text)
    record = await store.load(lease.session_id)
    assert record is not None
    assert record.locations == ()
