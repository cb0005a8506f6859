"""A coordinator takes sessions under a name of its own process, and undoes an acquisition that is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from coordinator.generation.session_leases import TAKEOVER_PAUSE_S, Leases
from specdec.contract.errors import NotFound, SessionBusy, Unavailable
from specdec.contract.tenant import DEFAULT_TENANT, SessionKey
from specdec.state.redis_store import open_store
from specdec.state.store import Lease, SessionStore
from tests.support.store_sessions import LONG_TTL_S, REQUEST, tokens

KEY = SessionKey(DEFAULT_TENANT, "s")


class HeldStore:
    """A session store whose acquisitions take effect at once, but are answered when the gate opens."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self.taken, self.gate = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def of_tenant(self, tenant: str) -> HeldStore:
        return self

    async def acquire(self, session_id: str, **options: Any) -> Lease:
        lease = await self._store.acquire(session_id, **options)
        self.taken.set()
        await self.gate.wait()
        return lease


@pytest.fixture
async def store() -> AsyncIterator[SessionStore]:
    store = open_store("memory://leases")
    yield store
    await store.delete("s")
    await store.close()


def leases(store: Any, *, ttl_s: float = LONG_TTL_S) -> Leases:
    return Leases(store, "c", ttl_s)


async def test_only_the_process_that_took_a_lease_recognises_it_as_its_own(
    store: SessionStore,
) -> None:
    ours, theirs = leases(store), leases(store)
    lease = await ours.acquire(KEY, create=True)
    assert ours.is_ours(lease.owner)
    assert not theirs.is_ours(lease.owner)
    assert lease.owner.startswith("c:")
    assert lease.ttl_s == LONG_TTL_S
    record = await store.load("s")
    assert record is not None
    assert (record.owner, record.epoch) == (lease.owner, lease.epoch)


async def test_two_requests_of_one_coordinator_do_not_share_a_session(store: SessionStore) -> None:
    ours = leases(store)
    first = await ours.acquire(KEY, create=True)
    with pytest.raises(SessionBusy):
        await ours.acquire(KEY, create=True)
    again = await ours.acquire(KEY, create=False, owner=first.owner)
    assert (again.owner, again.epoch > first.epoch) == (first.owner, True)


async def test_a_session_is_created_only_on_request(store: SessionStore) -> None:
    with pytest.raises(NotFound):
        await leases(store).acquire(KEY, create=False)
    with pytest.raises(NotFound):
        await leases(store).take_over(KEY)
    assert await store.load("s") is None


async def abandoned(held: HeldStore, *, create: bool) -> None:
    """Cancel an acquisition after the store has done it and before its answer."""
    taking = asyncio.ensure_future(leases(held).acquire(KEY, create=create))
    await asyncio.wait_for(held.taken.wait(), 10)
    taking.cancel()
    await asyncio.sleep(0)
    held.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await taking


async def test_cancelling_leaves_no_session_that_was_created_for_it(store: SessionStore) -> None:
    await abandoned(HeldStore(store), create=True)
    assert await store.load("s") is None


@pytest.mark.parametrize("was_left", [True, False])
async def test_cancelling_releases_a_session_with_a_request_unchanged(store: SessionStore, was_left: bool) -> None:
    lease = await store.acquire("s", owner="before", ttl_s=LONG_TTL_S, create=True)
    await store.begin_request(lease, REQUEST, keep=0, token_ids=tokens(1, 2, 3))
    await store.release(lease, left=was_left)
    await abandoned(HeldStore(store), create=False)
    record = await store.load("s")
    assert record is not None
    assert (record.owner, record.was_left, record.num_tokens) == ("", was_left, 3)


async def test_cancelling_an_acquisition_that_fails_raises_only_the_cancellation(store: SessionStore) -> None:
    failing = HeldStore(store)
    acquire = failing.acquire

    async def fail(session_id: str, **options: Any) -> Lease:
        await acquire(session_id, **options)
        raise Unavailable("the store is gone")

    failing.acquire = fail  # type: ignore[method-assign]
    await abandoned(failing, create=True)


async def test_a_takeover_waits_for_a_dead_owners_lease_to_end(store: SessionStore) -> None:
    dead = await store.acquire("s", owner="dead", ttl_s=0.3, create=True)
    taken = await leases(store, ttl_s=0.3).take_over(KEY)
    assert taken.epoch > dead.epoch


async def test_a_takeover_from_a_live_owner_is_refused_in_the_end(store: SessionStore) -> None:
    await store.acquire("s", owner="alive", ttl_s=LONG_TTL_S, create=True)
    began = asyncio.get_running_loop().time()
    with pytest.raises(SessionBusy):
        await asyncio.wait_for(leases(store, ttl_s=0.3).take_over(KEY), 60)
    assert asyncio.get_running_loop().time() - began > 0.3 + TAKEOVER_PAUSE_S
