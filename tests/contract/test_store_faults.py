"""Session stores whose Redis lost writes or cannot be reached (contract: `specdec.state.store`)."""

from __future__ import annotations

import asyncio

import pytest

from specdec.contract.errors import InvalidRequest, LeaseLost, SessionLost, Unavailable
from specdec.state.connection import RedisConnection
from specdec.state.key_names import session_keys
from specdec.state.redis_store import open_store
from specdec.state.store import Lease, SessionStore
from tests.support.redis_fixture import RedisServer
from tests.support.store_sessions import LONG_TTL_S, REQUEST, a_round, held_tokens, lose_tokens, tokens


async def test_a_shorter_log_is_a_lost_session_until_its_owner_repairs_it(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease
) -> None:
    await store.commit(lease, a_round(0, 3, 4, 5))
    await lose_tokens(raw, session_id, keep=4)
    with pytest.raises(SessionLost, match="4 tokens where 5"):
        await store.commit(lease, a_round(1, 5, 6))
    with pytest.raises(SessionLost):
        await store.commit(lease, a_round(0, 3, 4, 5))
    for _ in range(2):
        await store.begin_request(lease, REQUEST, keep=4, token_ids=tokens(5))
    await store.commit(lease, a_round(1, 5, 6))
    assert await held_tokens(store, session_id) == [1, 2, 3, 4, 5, 6]


async def test_a_store_that_forgot_rounds_takes_the_owners_next_one_after_a_repair(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease
) -> None:
    await store.commit(lease, a_round(0, 3, 4))
    await store.commit(lease, a_round(1, 4, 5))
    meta = session_keys("default", session_id)[0]
    await raw.run_command("HSET", meta, "round", 0)
    await lose_tokens(raw, session_id, keep=3)
    with pytest.raises(SessionLost):
        await store.commit(lease, a_round(2, 5, 6))
    await store.begin_request(lease, REQUEST, keep=3, token_ids=tokens(4, 5), round_id=2)
    await store.commit(lease, a_round(2, 5, 6))
    record = await store.load(session_id)
    assert record is not None
    assert (record.round_id, record.num_tokens) == (3, 6)
    with pytest.raises(LeaseLost):
        await store.commit(lease, a_round(9, 6, 7))


@pytest.mark.parametrize("operation", ["ping", "load"])
async def test_a_loop_over_a_store_ends_however_many_turns_later_it_is_cancelled(
    store: SessionStore, session_id: str, lease: Lease, operation: str
) -> None:
    async def use_for_ever() -> None:
        while True:
            await (store.ping() if operation == "ping" else store.load(session_id))
            await asyncio.sleep(0)  # the in-memory store never waits

    await store.ping()  # connected
    for num_turns in range(60):
        task = asyncio.create_task(use_for_ever())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        ended, _ = await asyncio.wait([task], timeout=60)
        assert ended, f"cancelled after {num_turns} turns of the event loop"
        assert task.cancelled()


async def test_an_incomplete_token_at_the_end_of_a_log_is_ignored(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease
) -> None:
    await raw.run_command("SET", session_keys("default", session_id)[1], bytes([1, 0, 0, 0, 2, 0]))
    record = await store.load(session_id)
    assert record is not None
    assert record.num_tokens == 1
    with pytest.raises(SessionLost, match="holds 1 tokens where 2"):
        await store.begin_request(lease, REQUEST, keep=2, token_ids=tokens(3))
    await store.begin_request(lease, REQUEST, keep=1, token_ids=tokens(3))
    assert await held_tokens(store, session_id) == [1, 3]


async def test_a_turn_whose_beginning_the_store_lost_is_lost_until_its_owner_writes_it_again(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    """The log is the older turn's. It may be as long as that of the lost turn, and hold other tokens."""
    await store.release(lease)
    now = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=False)
    with pytest.raises(SessionLost, match="holds 0 tokens where 3 were"):
        await store.commit(now, a_round(0, 3, 4))
    assert await held_tokens(store, session_id) == [1, 2, 3]
    await store.begin_request(now, REQUEST, keep=1, token_ids=tokens(7, 8), round_id=2)
    await store.commit(now, a_round(2, 3, 4))
    assert await held_tokens(store, session_id) == [1, 7, 8, 4]


@pytest.mark.parametrize("base_len", [0, 1, 2, 3])
async def test_a_repair_replaces_what_the_log_holds_beyond_its_base(
    store: SessionStore, session_id: str, lease: Lease, base_len: int
) -> None:
    await store.begin_request(lease, REQUEST, keep=base_len, token_ids=tokens(8, 9))
    await store.commit(lease, a_round(0, base_len + 2, 10))
    assert await held_tokens(store, session_id) == [*[1, 2, 3][:base_len], 8, 9, 10]


async def test_a_repair_beyond_the_log_is_refused(store: SessionStore, session_id: str, lease: Lease) -> None:
    with pytest.raises(SessionLost):
        await store.begin_request(lease, REQUEST, keep=4, token_ids=tokens(5))
    assert await held_tokens(store, session_id) == [1, 2, 3]


async def test_an_unreachable_store_is_unavailable_in_one_line_without_its_password() -> None:
    store = open_store("redis://user:secret@127.0.0.1:1/0")
    for call in (store.ping(), store.load("s"), store.delete("s"), store.read_tokens("s")):
        with pytest.raises(Unavailable) as failure:
            await call
        assert failure.value.reason == "STORE_UNAVAILABLE"
        assert "127.0.0.1:1" in failure.value.message
        assert "secret" not in failure.value.message
        assert "\n" not in failure.value.message
    await store.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1", "redis://h:port", "127.0.0.1:6379"])
def test_a_malformed_store_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        open_store(url)


async def test_epochs_never_decrease_after_the_store_lost_all_data(tmp_path_factory: pytest.TempPathFactory) -> None:
    server = RedisServer(tmp_path_factory.mktemp("lossy"))
    server.start()
    store = open_store(server.url)
    lease = await store.acquire("s", owner="me", ttl_s=LONG_TTL_S, create=True)
    flusher = RedisConnection(server.url)
    await flusher.run_command("FLUSHALL")
    remade = await store.acquire("s", owner="me", ttl_s=LONG_TTL_S, create=True)
    assert remade.epoch > lease.epoch

    server.stop()
    with pytest.raises(Unavailable):
        await store.renew(remade)
    server.start()
    with pytest.raises(LeaseLost):
        await store.renew(remade)
    again = await store.acquire("s", owner="me", ttl_s=LONG_TTL_S, create=True)
    assert again.epoch > remade.epoch
    await flusher.close()
    await store.close()
    server.stop()


async def test_a_stored_epoch_ahead_of_the_clock_still_rises(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease
) -> None:
    ahead = lease.epoch + 10**15
    await raw.run_command("HSET", session_keys("default", session_id)[0], "epoch", ahead)
    taken = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=False)
    assert taken.epoch == ahead + 1
