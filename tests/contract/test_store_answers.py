"""Errors and times of every session store (contract: `specdec.state.store`)."""

from __future__ import annotations

import asyncio

import pytest

from specdec.contract.errors import LeaseLost, NotFound, SessionBusy, SessionLost, Unavailable
from specdec.state.connection import RedisConnection
from specdec.state.key_names import session_keys
from specdec.state.redis_store import RedisSessionStore, open_store
from specdec.state.store import Lease, SessionStore
from tests.support.store_sessions import (
    LONG_TTL_S,
    REQUEST,
    a_round,
    forget_session,
    held_tokens,
    lose_tokens,
    take_over,
    tokens,
)

#: So long that a factor of 1.001 exceeds any delay of a machine.
LEASE_TTL_S = 200_000.0
SESSION_TTL_S = 1_000_000.0
SLOW_S = 150.0


async def test_an_error_about_a_session_names_the_session_and_the_field(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    with pytest.raises(SessionBusy, match=f"^session '{session_id}' is running another request$") as busy:
        await store.acquire(session_id, owner="other", ttl_s=LONG_TTL_S, create=True)
    assert busy.value.field == "session_id"
    with pytest.raises(NotFound, match=f"^session '{session_id}-2' does not exist$") as missing:
        await store.acquire(f"{session_id}-2", owner="other", ttl_s=LONG_TTL_S, create=False)
    assert missing.value.field == "session_id"


async def test_a_lost_lease_is_reported_with_its_session_and_epoch(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease
) -> None:
    await forget_session(raw, session_id)
    told = f"^the lease of session '{session_id}' at epoch {lease.epoch} is lost$"
    for call in (
        store.renew(lease),
        store.begin_request(lease, REQUEST, keep=0, token_ids=tokens(1)),
        store.commit(lease, a_round(0, 0, 1)),
    ):
        with pytest.raises(LeaseLost, match=told):
            await call


async def test_a_lost_session_is_reported_with_both_log_lengths(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease
) -> None:
    await store.commit(lease, a_round(0, 3, 4))
    await lose_tokens(raw, session_id, keep=2)
    told = f"^the log of session '{session_id}' holds 2 tokens where %d were committed$"
    for call, expected in (
        (store.begin_request(lease, REQUEST, keep=3, token_ids=tokens(1)), 3),
        (store.commit(lease, a_round(1, 4, 1)), 4),
        (store.commit(lease, a_round(0, 3, 4)), 3),
    ):
        with pytest.raises(SessionLost, match=told % expected):
            await call
    assert await held_tokens(store, session_id) == [1, 2]


async def test_ttls_are_stored_exactly(store_url: str, raw: RedisConnection, session_id: str) -> None:
    store = RedisSessionStore(store_url, session_ttl_s=SESSION_TTL_S)
    lease_key = session_keys("default", session_id)[2]

    async def expect_whole_times() -> None:
        left_s = await raw.run_command("PTTL", lease_key) / 1000
        record = await store.load(session_id)
        assert record is not None
        assert LEASE_TTL_S - SLOW_S < left_s <= LEASE_TTL_S
        assert SESSION_TTL_S - SLOW_S < record.expires_in_s <= SESSION_TTL_S

    lease = await store.acquire(session_id, owner="me", ttl_s=LEASE_TTL_S, create=True)
    await expect_whole_times()
    for key in session_keys("default", session_id):
        await raw.run_command("PEXPIRE", key, 60_000)
    await store.renew(lease)
    await expect_whole_times()
    await store.delete(session_id)
    await store.close()


async def test_a_lease_may_be_shorter_than_a_millisecond(store: SessionStore, session_id: str) -> None:
    await store.acquire(session_id, owner="me", ttl_s=1e-6, create=True)
    async with asyncio.timeout(10):
        while (record := await store.load(session_id)) is None or record.owner:
            pass


async def test_a_session_whose_key_does_not_expire_reports_no_remaining_time(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease
) -> None:
    await raw.run_command("PERSIST", session_keys("default", session_id)[0])
    record = await store.load(session_id)
    assert record is not None
    assert record.expires_in_s == 0.0


async def test_a_reopened_store_is_the_same_store(store_url: str, session_id: str) -> None:
    store, elsewhere = open_store(store_url, tenant="ours", session_ttl_s=SESSION_TTL_S), open_store(store_url)
    lease = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    assert await elsewhere.load(session_id) is None
    again = store.reopen()
    await store.close()
    await elsewhere.close()
    await again.ping()
    await again.renew(lease)
    record = await again.load(session_id)
    assert record is not None
    assert (record.owner, record.epoch) == ("me", lease.epoch)
    assert record.expires_in_s > SESSION_TTL_S - SLOW_S
    await again.delete(session_id)
    await again.close()


@pytest.mark.parametrize("of_log", [True, False])
async def test_keys_of_a_wrong_type_are_an_error_of_that_session_alone(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease, of_log: bool
) -> None:
    other = await store.acquire(f"{session_id}-2", owner="me", ttl_s=LONG_TTL_S, create=True)
    await take_over(store, other, 0)
    key = session_keys("default", session_id)[1 if of_log else 2]
    await raw.run_command("DEL", key)
    await raw.run_command("HSET", key, "not", "a string")
    if of_log:
        broken, right = await store.commit_all([(lease, a_round(0, 3, 4)), (other, a_round(0, 0, 4))])
        with pytest.raises(SessionLost):
            await store.commit(lease, a_round(0, 3, 4))
        assert isinstance(broken, SessionLost)
    else:
        broken, right = await store.renew_all([lease, other])
        with pytest.raises(Unavailable):
            await store.renew(lease)
        assert isinstance(broken, Unavailable)
    assert right is None
    await raw.run_command("DEL", key)
