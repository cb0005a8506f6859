"""Scripts that start in one turn of the event loop share a pipeline and are otherwise independent."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from specdec.contract.errors import InvalidRequest, SessionLost, Unavailable
from specdec.state.connection import RedisConnection
from specdec.state.key_names import session_keys
from specdec.state.redis_store import open_store
from specdec.state.store import Lease, SessionStore
from tests.support.store_sessions import REQUEST, a_round, tokens

SESSIONS = [f"batch-{index}" for index in range(40)]


async def acquire(store: SessionStore, session_id: str) -> Lease:
    return await store.acquire(session_id, owner="owner", ttl_s=30.0, create=True)


async def test_scripts_that_start_together_use_one_connection(store_url: str, store: SessionStore) -> None:
    if not store_url.startswith("unix:"):
        pytest.skip("only a Redis of its own tells who is connected")
    counter = RedisConnection(store_url)
    await counter.run_command("PING")
    before = len((await counter.run_command("CLIENT", "LIST")).splitlines())
    await asyncio.gather(*(acquire(store, session_id) for session_id in SESSIONS))
    assert len((await counter.run_command("CLIENT", "LIST")).splitlines()) == before + 1
    await counter.close()


async def test_every_script_of_a_batch_gets_its_own_answer(store: SessionStore) -> None:
    leases = await asyncio.gather(*(acquire(store, session_id) for session_id in SESSIONS))
    assert [lease.session_id for lease in leases] == SESSIONS
    records = await asyncio.gather(*(store.load(session_id) for session_id in [*SESSIONS, "batch-unknown"]))
    assert [record.epoch for record in records if record] == [lease.epoch for lease in leases]
    assert records[-1] is None


async def test_scripts_are_loaded_again_into_a_server_that_lost_them(store: SessionStore, raw: RedisConnection) -> None:
    await acquire(store, SESSIONS[0])
    await raw.run_command("SCRIPT", "FLUSH")
    calls = [acquire(store, session_id) for session_id in SESSIONS[:3]]
    *leases, record = await asyncio.gather(*calls, store.load(SESSIONS[5]))
    assert [lease.session_id for lease in leases] == SESSIONS[:3]
    assert record is None or record.session_id == SESSIONS[5]


async def test_a_script_that_fails_fails_alone(store: SessionStore, raw: RedisConnection) -> None:
    broken_meta = session_keys("default", "batch-broken")[0]
    await raw.run_command("SET", broken_meta, "not a hash")
    try:
        calls = [acquire(store, session_id) for session_id in ("batch-before", "batch-broken", "batch-after")]
        before, broken, after = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(before, Lease)
        assert isinstance(after, Lease)
        assert isinstance(broken, SessionLost)
    finally:
        await raw.run_command("DEL", broken_meta)


async def test_a_script_cancelled_before_it_was_sent_never_runs(store: SessionStore) -> None:
    given_up = asyncio.create_task(acquire(store, "batch-cancelled"))
    kept = asyncio.create_task(acquire(store, "batch-kept"))
    await asyncio.sleep(0)  # both have started, nothing was sent
    given_up.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await given_up
    assert (await kept).session_id == "batch-kept"
    assert await store.load("batch-cancelled") is None


async def test_closing_fails_running_scripts(store_url: str) -> None:
    store = open_store(store_url)
    under_way = asyncio.create_task(acquire(store, "batch-closing"))
    await asyncio.sleep(0)
    await store.close()
    with pytest.raises(Unavailable, match="closed"):
        await under_way


async def test_leases_of_several_tenants_are_renewed_and_committed_in_one_message(store: SessionStore) -> None:
    tenants = ("default", "batch-ours", "batch-theirs")
    views = [store.of_tenant(tenant) for tenant in tenants]
    leases = [await acquire(view, "batch-shared") for view in views]
    assert [lease.tenant for lease in leases] == list(tenants)
    for number, lease in enumerate(leases):
        await store.begin_request(lease, REQUEST, keep=0, token_ids=tokens(number))
    answers = await store.commit_all([(lease, a_round(0, 1, 7)) for lease in leases])
    assert answers == await store.renew_all(leases) == [None] * 3
    for number, view in enumerate(views):
        assert (await view.read_tokens("batch-shared")).tolist() == [number, 7]
    await store.discard(leases[1])
    assert [await view.load("batch-shared") is None for view in views] == [False, True, False]
    with pytest.raises(InvalidRequest, match="is not 1 to 64 letters"):
        store.of_tenant("a:b")
