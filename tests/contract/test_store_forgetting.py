"""What a session store forgets, and what it keeps apart (the contract: `specdec.state.store`)."""

from __future__ import annotations

import asyncio

import pytest

from specdec.errors import InvalidRequest, LeaseLost
from specdec.state.connection import RedisConnection
from specdec.state.keys import session_keys
from specdec.state.redis_store import RedisSessionStore
from specdec.state.store import Lease, SessionStore
from tests.support.store_sessions import LONG_TTL_S, SHORT_TTL_S, a_round, held_tokens


async def test_a_deleted_session_is_gone_whoever_held_it(store: SessionStore, session_id: str, lease: Lease) -> None:
    for _ in range(2):
        await store.delete(session_id)
    assert await store.load(session_id) is None
    assert await held_tokens(store, session_id) == []
    with pytest.raises(LeaseLost):
        await store.commit(lease, a_round(0, 3, 4))
    await store.release(lease)


async def test_a_remade_session_has_a_higher_epoch_and_fences_the_old_owner(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    await store.delete(session_id)
    remade = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    assert remade.epoch > lease.epoch
    with pytest.raises(LeaseLost):
        await store.commit(lease, a_round(0, 0, 4))
    assert await held_tokens(store, session_id) == []


async def test_an_unused_session_expires_and_use_prolongs_it(store_url: str, session_id: str) -> None:
    brief, lasting = RedisSessionStore(store_url, session_ttl_s=SHORT_TTL_S), RedisSessionStore(store_url)
    lease = await brief.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    record = await brief.load(session_id)
    assert record is None or record.expires_in_s <= SHORT_TTL_S
    async with asyncio.timeout(10):
        while await brief.load(session_id):
            pass
    with pytest.raises(LeaseLost):
        await brief.renew(lease)
    lease = await lasting.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    await lasting.renew(lease)
    record = await lasting.load(session_id)
    assert record is not None
    assert record.expires_in_s > 3500
    await brief.close()
    await lasting.close()


async def test_no_key_of_a_session_outlives_it(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease
) -> None:
    await store.commit(lease, a_round(0, 3, 4))
    for key in session_keys("default", session_id):
        assert await raw.run_command("PTTL", key) > 0
    await store.delete(session_id)
    assert await raw.run_command("KEYS", f"*{session_id}*") == []


async def test_tenants_do_not_see_each_others_sessions(store_url: str, session_id: str) -> None:
    ours, theirs = (RedisSessionStore(store_url, tenant=tenant) for tenant in ("ours", "theirs"))
    await ours.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    assert await theirs.load(session_id) is None
    await theirs.delete(session_id)
    assert await ours.load(session_id) is not None
    await ours.close()
    await theirs.close()


@pytest.mark.parametrize("session_id", ["", "a{b", "}", "line\nbreak", "x" * 257])
async def test_a_session_id_that_breaks_keys_is_refused_by_name(store: SessionStore, session_id: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await store.load(session_id)
    assert refusal.value.field == "session_id"
