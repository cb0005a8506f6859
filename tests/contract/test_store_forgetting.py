"""Deletion, expiry and separation of sessions in every session store (contract: `specdec.state.store`)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specdec.contract.errors import InvalidRequest, LeaseLost, NotFound
from specdec.state.connection import RedisConnection
from specdec.state.key_names import session_keys
from specdec.state.redis_store import RedisSessionStore
from specdec.state.store import Lease, SessionStore
from tests.support.store_sessions import LONG_TTL_S, REQUEST, SHORT_TTL_S, a_round, forget_session, held_tokens, tokens


async def test_a_deleted_session_is_gone_whichever_owner_had_it(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    for _ in range(2):
        await store.delete(session_id)
    assert await store.load(session_id) is None
    assert await held_tokens(store, session_id) == []
    await store.release(lease)


async def test_an_owner_of_a_deleted_session_gets_not_found_even_if_it_is_created_again(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    await store.delete(session_id)
    for _ in range(2):
        for call in (
            store.renew(lease),
            store.begin_request(lease, REQUEST, keep=0, token_ids=tokens(1)),
            store.commit(lease, a_round(0, 3, 1)),
            store.discard(lease),
        ):
            with pytest.raises(NotFound, match=f"^session '{session_id}' was deleted$") as failure:
                await call
            assert failure.value.field == "session_id"
        await store.delete(session_id)  # a second deletion keeps the mark
        remade = await store.acquire(session_id, owner="other", ttl_s=LONG_TTL_S, create=True)
    assert remade.epoch > lease.epoch
    assert await held_tokens(store, session_id) == []


async def test_an_owner_gets_not_found_if_the_store_lost_the_session_before_its_deletion(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease
) -> None:
    await forget_session(raw, session_id)
    await store.delete(session_id)
    with pytest.raises(NotFound):
        await store.renew(lease)


async def test_an_owner_that_acquired_after_the_deletion_gets_lease_lost(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    await store.delete(session_id)
    remade = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    await store.release(remade)
    with pytest.raises(LeaseLost):
        await store.renew(remade)
    with pytest.raises(NotFound):
        await store.renew(lease)


async def test_a_session_deleted_under_a_clock_ahead_is_fenced_too(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease
) -> None:
    ahead = lease.epoch + 10**15
    await raw.run_command("HSET", session_keys("default", session_id)[0], "epoch", ahead)
    for _ in range(2):
        await store.delete(session_id)
    with pytest.raises(NotFound):
        await store.renew(replace(lease, epoch=ahead))
    remade = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    assert remade.epoch == ahead + 1
    await store.renew(remade)


async def test_a_discarded_session_leaves_no_trace(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease
) -> None:
    with pytest.raises(LeaseLost):
        await store.discard(replace(lease, owner="other"))
    with pytest.raises(LeaseLost):
        await store.discard(replace(lease, epoch=lease.epoch - 1))
    assert await held_tokens(store, session_id) == [1, 2, 3]
    await store.discard(lease)
    assert await raw.run_command("KEYS", f"*{session_id}*") == []
    with pytest.raises(LeaseLost):
        await store.discard(lease)


async def test_a_session_created_again_has_a_higher_epoch_and_fences_the_old_owner(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease
) -> None:
    await forget_session(raw, session_id)
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


async def test_only_the_deletion_mark_outlives_a_session(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease
) -> None:
    await store.commit(lease, a_round(0, 3, 4))
    *of_session, of_deletion = session_keys("default", session_id)
    for key in of_session:
        assert await raw.run_command("PTTL", key) > 0
    await store.delete(session_id)
    assert await raw.run_command("KEYS", f"*{session_id}*") == [of_deletion.encode()]
    assert 0 < await raw.run_command("PTTL", of_deletion) <= 600_000


async def test_tenants_do_not_see_each_others_sessions(store_url: str, session_id: str) -> None:
    ours, theirs = (RedisSessionStore(store_url, tenant=tenant) for tenant in ("ours", "theirs"))
    await ours.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    assert await theirs.load(session_id) is None
    await theirs.delete(session_id)
    assert await ours.load(session_id) is not None
    await ours.close()
    await theirs.close()


@pytest.mark.parametrize("session_id", ["", "a{b", "}", "line\nbreak", "x" * 257])
async def test_a_session_id_that_would_break_keys_is_refused(store: SessionStore, session_id: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await store.load(session_id)
    assert refusal.value.field == "session_id"
