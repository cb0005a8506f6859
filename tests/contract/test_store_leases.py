"""Leases and fencing in every session store (contract: `specdec.state.store`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from specdec.contract.errors import LeaseLost, NotFound, SessionBusy
from specdec.state.connection import RedisConnection
from specdec.state.key_names import session_keys
from specdec.state.redis_store import DEFAULT_SESSION_TTL_S, open_store
from specdec.state.store import Lease, SessionStore
from tests.support.store_sessions import (
    LONG_TTL_S,
    REQUEST,
    SHORT_TTL_S,
    a_round,
    acquire_when_free,
    held_tokens,
    lose_tokens,
    take_over,
    tokens,
)


async def test_acquiring_an_unknown_session_needs_create(store: SessionStore, session_id: str) -> None:
    with pytest.raises(NotFound):
        await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=False)
    assert await store.load(session_id) is None
    lease = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    assert (lease.session_id, lease.owner, lease.ttl_s) == (session_id, "me", LONG_TTL_S)


async def test_a_leased_session_is_busy_for_others(store: SessionStore, session_id: str, lease: Lease) -> None:
    for create in (True, False):
        with pytest.raises(SessionBusy):
            await store.acquire(session_id, owner="other", ttl_s=LONG_TTL_S, create=create)
    await store.renew(lease)


async def test_a_released_session_is_free_and_its_next_epoch_is_higher(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    await store.release(lease)
    await store.release(lease)
    taken = await store.acquire(session_id, owner="other", ttl_s=LONG_TTL_S, create=False)
    assert taken.epoch > lease.epoch
    with pytest.raises(LeaseLost):
        await store.renew(lease)


async def test_releasing_a_lost_lease_leaves_the_new_one_alone(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    await store.release(lease)
    taken = await store.acquire(session_id, owner="other", ttl_s=LONG_TTL_S, create=False)
    await store.release(lease)
    await store.renew(taken)


async def test_an_expired_lease_is_free_and_its_old_owner_is_fenced(store: SessionStore, session_id: str) -> None:
    old = await store.acquire(session_id, owner="old", ttl_s=SHORT_TTL_S, create=True)
    new = await acquire_when_free(store, session_id, "new")
    assert new.epoch > old.epoch
    with pytest.raises(LeaseLost):
        await store.renew(old)
    with pytest.raises(LeaseLost):
        await store.begin_request(old, REQUEST, keep=0, token_ids=tokens(1))
    with pytest.raises(LeaseLost):
        await store.commit(old, a_round(0, 0, 7))
    assert await held_tokens(store, session_id) == []


async def test_an_owner_that_acquires_again_fences_its_own_older_epoch(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    again = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=False)
    assert again.epoch > lease.epoch
    with pytest.raises(LeaseLost):
        await store.commit(lease, a_round(0, 3, 7))
    await take_over(store, again, 3)
    await store.commit(again, a_round(0, 3, 7))


async def test_one_of_fifty_concurrent_acquires_succeeds(store_url: str, session_id: str) -> None:
    stores = [open_store(store_url) for _ in range(2)]
    outcomes = await asyncio.gather(
        *(stores[i % 2].acquire(session_id, owner=f"owner-{i}", ttl_s=LONG_TTL_S, create=True) for i in range(50)),
        return_exceptions=True,
    )
    winners = [outcome for outcome in outcomes if isinstance(outcome, Lease)]
    assert len(winners) == 1
    assert all(isinstance(outcome, Lease | SessionBusy) for outcome in outcomes)
    record = await stores[0].load(session_id)
    assert record is not None
    assert (record.owner, record.epoch) == (winners[0].owner, winners[0].epoch)
    for store in stores:
        await store.close()


async def outlive(raw: RedisConnection, session_id: str, ttl_s: float | None) -> None:
    """Change a session's lease as a clock that jumps back does: it expires much later than intended."""
    key = session_keys("default", session_id)[2]
    await (raw.run_command("PERSIST", key) if ttl_s is None else raw.run_command("PEXPIRE", key, round(ttl_s * 1000)))


@pytest.mark.parametrize("outlives_s", [LONG_TTL_S + 1.0, LONG_TTL_S + 3600.0, None])
async def test_a_lease_that_would_outlive_its_ttl_is_void_and_its_owner_is_fenced(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease, outlives_s: float | None
) -> None:
    await outlive(raw, session_id, outlives_s)
    record = await store.load(session_id)
    assert record is not None
    assert (record.owner, record.status) == ("", "idle")
    taken = await store.acquire(session_id, owner="other", ttl_s=LONG_TTL_S, create=False)
    assert taken.epoch > lease.epoch
    with pytest.raises(LeaseLost):
        await store.renew(lease)
    with pytest.raises(LeaseLost):
        await store.commit(lease, a_round(0, 3, 7))
    await store.release(lease)
    await take_over(store, taken, 3)
    await store.commit(taken, a_round(0, 3, 8))
    assert await held_tokens(store, session_id) == [1, 2, 3, 8]


async def test_a_lease_lives_for_its_own_ttl_whatever_ttl_another_owner_requests(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    with pytest.raises(SessionBusy):
        await store.acquire(session_id, owner="hasty", ttl_s=SHORT_TTL_S, create=False)
    await store.renew(lease)
    with pytest.raises(SessionBusy):
        await store.acquire(session_id, owner="hasty", ttl_s=SHORT_TTL_S, create=False)


async def test_a_lease_without_a_stored_ttl_is_alive(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease
) -> None:
    await raw.run_command("HDEL", session_keys("default", session_id)[0], "lease_ttl")
    record = await store.load(session_id)
    assert record is not None
    assert record.owner == "me"
    with pytest.raises(SessionBusy):
        await store.acquire(session_id, owner="other", ttl_s=LONG_TTL_S, create=False)


async def test_a_living_owner_renews_its_lease_back_to_its_ttl_after_the_clock_jumped(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease
) -> None:
    await outlive(raw, session_id, 3600.0)
    await store.renew(lease)
    with pytest.raises(SessionBusy):
        await store.acquire(session_id, owner="other", ttl_s=LONG_TTL_S, create=False)
    record = await store.load(session_id)
    assert record is not None
    assert record.owner == "me"


async def test_a_session_stays_in_order_through_an_owner_that_writes_nothing(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    states = [await store.load(session_id)]
    await store.release(lease)
    states.append(await store.load(session_id))
    unused = await store.acquire(session_id, owner="other", ttl_s=LONG_TTL_S, create=False)
    states.append(await store.load(session_id))
    await store.release(unused, left=unused.was_left)
    states.append(await store.load(session_id))
    failed = await store.acquire(session_id, owner="other", ttl_s=LONG_TTL_S, create=False)
    await store.release(failed, left=False)
    states.append(await store.load(session_id))
    assert [state is not None and state.was_left for state in states] == [False, True, False, True, False]


@pytest.mark.parametrize("has_begun", [True, False])
@pytest.mark.parametrize("num_held", [3, 2])
async def test_a_session_that_lost_tokens_of_the_turn_is_not_left_in_order(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease, has_begun: bool, num_held: int
) -> None:
    await lose_tokens(raw, session_id, keep=num_held)
    if not has_begun:
        await raw.run_command("HDEL", session_keys("default", session_id)[0], "begun")
    await store.release(lease, num_tokens=3)
    record = await store.load(session_id)
    assert record is not None
    assert (record.owner, record.was_left) == ("", has_begun and num_held == 3)


# ---- every write is fenced, and prolongs --------------------------------------------------------------------------

Operation = Callable[[SessionStore, Lease], Awaitable[Any]]

OPERATIONS: dict[str, Operation] = {
    "renew": lambda store, lease: store.renew(lease),
    "begin_request": lambda store, lease: store.begin_request(lease, REQUEST, keep=3, token_ids=tokens(4)),
    "commit": lambda store, lease: store.commit(lease, a_round(0, 3, 7)),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
async def test_a_write_needs_the_owners_name_and_its_newest_epoch(
    store: SessionStore, session_id: str, lease: Lease, operation: Operation
) -> None:
    now = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=False)
    await take_over(store, now, 3)
    for forged in (lease, replace(now, owner="other"), replace(now, epoch=now.epoch + 1)):
        with pytest.raises(LeaseLost):
            await operation(store, forged)
    record = await store.load(session_id)
    assert record is not None
    assert (record.owner, record.epoch, record.round_id) == ("me", now.epoch, 0)
    assert await held_tokens(store, session_id) == [1, 2, 3]
    await operation(store, now)


async def test_a_release_needs_the_owners_name_and_its_newest_epoch(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    now = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=False)
    for forged in (lease, replace(now, owner="other"), replace(now, epoch=now.epoch + 1)):
        await store.release(forged)
        record = await store.load(session_id)
        assert record is not None
        assert (record.owner, record.was_left) == ("me", False)
    await store.release(now)
    record = await store.load(session_id)
    assert record is not None
    assert (record.owner, record.was_left) == ("", True)


@pytest.mark.parametrize(
    "operation",
    [
        *OPERATIONS.values(),
        lambda store, lease: store.acquire(lease.session_id, owner="me", ttl_s=LONG_TTL_S, create=False),
        lambda store, lease: store.release(lease),
    ],
    ids=[*OPERATIONS, "acquire", "release"],
)
async def test_every_operation_on_a_lease_prolongs_the_record_and_the_log_alike(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease, operation: Operation
) -> None:
    keys = session_keys("default", session_id)[:2]
    for key in keys:
        await raw.run_command("PEXPIRE", key, 30_000)
    await operation(store, lease)
    for key in keys:
        assert await raw.run_command("PTTL", key) > (DEFAULT_SESSION_TTL_S - 60) * 1000


async def test_a_lease_states_whether_its_session_was_given_back_in_order(store: SessionStore, session_id: str) -> None:
    told = []
    for left in (False, True, True):
        lease = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
        told.append(lease.was_left)
        await store.release(lease, left=left)
    told.append((await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)).was_left)
    told.append((await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)).was_left)
    assert told == [False, False, True, True, False]


async def test_an_epoch_is_at_least_the_servers_time_in_microseconds(store: SessionStore, session_id: str) -> None:
    lease = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    assert abs(lease.epoch / 1e6 - time.time()) < 60  # the server runs on this machine


async def test_an_epoch_that_a_replica_has_seen_is_passed_and_fences_the_one_before(
    store: SessionStore, session_id: str
) -> None:
    lease = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    ahead = lease.epoch + 600_000_000
    raised = await store.raise_epoch(lease, above=ahead)
    assert (raised.epoch, raised.owner, raised.ttl_s) == (ahead + 1, "me", LONG_TTL_S)
    with pytest.raises(LeaseLost):
        await store.renew(lease)
    await store.renew(raised)
    await store.release(raised)
    assert (await store.acquire(session_id, owner="you", ttl_s=LONG_TTL_S, create=False)).epoch == ahead + 2


async def test_an_epoch_is_never_lowered_and_only_its_owner_raises_it(store: SessionStore, session_id: str) -> None:
    lease = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    assert await store.raise_epoch(lease, above=lease.epoch - 1) == lease
    for other in (replace(lease, owner="you"), replace(lease, epoch=lease.epoch - 1)):
        with pytest.raises(LeaseLost):
            await store.raise_epoch(other, above=lease.epoch + 5)
    record = await store.load(session_id)
    assert record is not None
    assert record.epoch == lease.epoch
