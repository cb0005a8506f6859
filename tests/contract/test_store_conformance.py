"""What every session store must do, run against each of them (the contract: `specdec.state.store`)."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from specdec.errors import InvalidRequest, LeaseLost, NotFound, SessionBusy, SessionLost, Unavailable
from specdec.state.connection import RedisConnection
from specdec.state.keys import session_keys
from specdec.state.redis_store import RedisSessionStore, open_store
from specdec.state.store import Commit, Lease, RequestRecord, SessionStore
from specdec.types import FinishReason, TokenIds
from tests.redis_fixture import RedisServer

LONG_TTL_S = 60.0
SHORT_TTL_S = 0.05

REQUEST = RequestRecord("r-1", "digest", '{"temperature": 0.7}', turn=0, output_start=3)


def tokens(*token_ids: int) -> TokenIds:
    return np.asarray(token_ids, np.uint32)


def a_round(round_id: int, base_len: int, *token_ids: int, finish_reason: FinishReason | None = None) -> Commit:
    return Commit(round_id, base_len, tokens(*token_ids), json.dumps({"num_rounds": round_id}), finish_reason)


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[SessionStore]:
    store = open_store(store_url)
    yield store
    await store.close()


@pytest.fixture
async def raw(store_url: str) -> AsyncIterator[RedisConnection]:
    """The store's own keys, for damage that only a failing Redis does."""
    connection = RedisConnection(store_url)
    yield connection
    await connection.close()


@pytest.fixture
def session_id() -> str:
    return f"s-{uuid.uuid4().hex}"


@pytest.fixture
async def lease(store: SessionStore, session_id: str) -> Lease:
    """A session of three prompt tokens whose request runs."""
    lease = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    await store.begin_request(lease, REQUEST, keep=0, token_ids=tokens(1, 2, 3))
    return lease


async def held_tokens(store: SessionStore, session_id: str) -> list[int]:
    return (await store.read_tokens(session_id)).tolist()


async def lose_tokens(raw: RedisConnection, session_id: str, keep: int) -> None:
    key = session_keys("default", session_id)[1]
    kept = await raw.run_command("GETRANGE", key, 0, keep * 4 - 1) if keep else b""
    await raw.run_command("SET", key, kept)


async def acquire_when_free(store: SessionStore, session_id: str, owner: str) -> Lease:
    async with asyncio.timeout(10):
        while True:
            try:
                return await store.acquire(session_id, owner=owner, ttl_s=LONG_TTL_S, create=False)
            except SessionBusy:
                continue


# ---- leases -----------------------------------------------------------------------------------------------------


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
    with pytest.raises(LeaseLost):
        await store.repair(old, base_len=0, token_ids=tokens(7))
    assert await held_tokens(store, session_id) == []


async def test_an_owner_that_acquires_again_fences_its_own_older_epoch(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    again = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=False)
    assert again.epoch > lease.epoch
    with pytest.raises(LeaseLost):
        await store.commit(lease, a_round(0, 3, 7))
    await store.commit(again, a_round(0, 3, 7))


async def test_of_fifty_concurrent_acquires_one_wins(store_url: str, session_id: str) -> None:
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


# ---- requests ---------------------------------------------------------------------------------------------------


async def test_a_begun_request_is_read_back_whole(store: SessionStore, session_id: str, lease: Lease) -> None:
    record = await store.load(session_id)
    assert record is not None
    assert record.request == REQUEST
    assert (record.epoch, record.round_id, record.num_tokens, record.owner) == (lease.epoch, 0, 3, "me")
    assert record.status == "running"
    assert 0 < record.expires_in_s <= 3600
    assert await held_tokens(store, session_id) == [1, 2, 3]


async def test_parameters_of_any_text_survive(store: SessionStore, session_id: str, lease: Lease) -> None:
    odd = replace(REQUEST, parameters_json=json.dumps({"stop": ["\r\n", "\0", "naïve 😀"]}, ensure_ascii=False))
    await store.begin_request(lease, odd, keep=3, token_ids=tokens())
    record = await store.load(session_id)
    assert record is not None
    assert record.request == odd


async def test_tokens_of_every_byte_pattern_survive(store: SessionStore, session_id: str, lease: Lease) -> None:
    odd = np.asarray([0, 10, 13, 0x0D0A, 0x0A0D0A0D, 2**31, 2**32 - 1], np.uint32)
    await store.begin_request(lease, REQUEST, keep=0, token_ids=odd)
    assert await held_tokens(store, session_id) == odd.tolist()


async def test_a_long_log_is_read_whole_and_from_any_position(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    log = np.random.default_rng(7).integers(0, 2**32, 300_000, dtype=np.uint32)
    await store.begin_request(lease, REQUEST, keep=0, token_ids=log)
    whole, end = await store.read_tokens(session_id), await store.read_tokens(session_id, 299_990)
    assert whole.dtype == np.uint32
    assert np.array_equal(whole, log)
    assert np.array_equal(end, log[299_990:])
    assert len(await store.read_tokens(session_id, 300_000)) == 0


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
async def test_a_new_turn_keeps_a_beginning_of_the_log(
    store: SessionStore, session_id: str, lease: Lease, keep: int
) -> None:
    await store.begin_request(lease, replace(REQUEST, turn=1), keep=keep, token_ids=tokens(8, 9))
    assert await held_tokens(store, session_id) == [*[1, 2, 3][:keep], 8, 9]


async def test_beginning_a_request_again_changes_nothing(store: SessionStore, session_id: str, lease: Lease) -> None:
    for _ in range(2):
        await store.begin_request(lease, replace(REQUEST, turn=1), keep=2, token_ids=tokens(8, 9))
    assert await held_tokens(store, session_id) == [1, 2, 8, 9]


async def test_keeping_more_than_the_log_holds_is_a_lost_session(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    with pytest.raises(SessionLost, match="3 tokens where 4"):
        await store.begin_request(lease, REQUEST, keep=4, token_ids=tokens(8))
    assert await held_tokens(store, session_id) == [1, 2, 3]


# ---- commits ----------------------------------------------------------------------------------------------------


async def test_rounds_append_in_order_and_the_last_one_ends_the_request(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    await store.commit(lease, a_round(0, 3, 4, 5))
    await store.commit(lease, a_round(1, 5, 6))
    await store.commit(lease, a_round(2, 6, finish_reason=FinishReason.LENGTH))
    record = await store.load(session_id)
    assert record is not None
    assert record.request is not None
    assert (record.round_id, record.num_tokens, record.status) == (3, 6, "idle")
    assert record.request.finish_reason is FinishReason.LENGTH
    assert json.loads(record.request.stats_json) == {"num_rounds": 2}
    assert (await store.read_tokens(session_id, 3)).tolist() == [4, 5, 6]


async def test_the_same_round_with_the_same_tokens_succeeds_once(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    for _ in range(3):
        await store.commit(lease, a_round(0, 3, 4, 5))
    assert await held_tokens(store, session_id) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("other", [(4, 6), (4,), (4, 5, 6), ()])
async def test_the_same_round_with_other_tokens_fails(
    store: SessionStore, session_id: str, lease: Lease, other: tuple[int, ...]
) -> None:
    await store.commit(lease, a_round(0, 3, 4, 5))
    with pytest.raises(LeaseLost):
        await store.commit(lease, a_round(0, 3, *other))
    assert await held_tokens(store, session_id) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("commit", [a_round(5, 4, 9), a_round(1, 3, 9), a_round(0, 4, 9)])
async def test_a_round_that_does_not_follow_fails(
    store: SessionStore, session_id: str, lease: Lease, commit: Commit
) -> None:
    await store.commit(lease, a_round(0, 3, 4))
    with pytest.raises(LeaseLost):
        await store.commit(lease, commit)
    assert await held_tokens(store, session_id) == [1, 2, 3, 4]


async def test_a_round_from_before_a_new_turn_is_not_answered_again(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    await store.commit(lease, a_round(0, 3, 4, finish_reason=FinishReason.STOP))
    await store.begin_request(lease, replace(REQUEST, turn=1), keep=3, token_ids=tokens(4))
    with pytest.raises(LeaseLost):
        await store.commit(lease, a_round(0, 3, 4))
    await store.commit(lease, a_round(1, 4, 5))
    assert await held_tokens(store, session_id) == [1, 2, 3, 4, 5]


# ---- lost writes ------------------------------------------------------------------------------------------------


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
        await store.repair(lease, base_len=4, token_ids=tokens(5))
    await store.commit(lease, a_round(1, 5, 6))
    assert await held_tokens(store, session_id) == [1, 2, 3, 4, 5, 6]


async def test_a_store_that_forgot_rounds_takes_the_owners_next_one_after_a_repair(
    store: SessionStore, raw: RedisConnection, session_id: str, lease: Lease
) -> None:
    await store.commit(lease, a_round(0, 3, 4))
    await store.commit(lease, a_round(1, 4, 5))
    meta = session_keys("default", session_id)[0]
    await raw.run_command("HSET", meta, "round", 0)
    await raw.run_command("HDEL", meta, "commit_base", "commit_count")
    await lose_tokens(raw, session_id, keep=3)
    with pytest.raises(SessionLost):
        await store.commit(lease, a_round(2, 5, 6))
    await store.repair(lease, base_len=3, token_ids=tokens(4, 5))
    await store.commit(lease, a_round(2, 5, 6))
    record = await store.load(session_id)
    assert record is not None
    assert (record.round_id, record.num_tokens) == (3, 6)
    with pytest.raises(LeaseLost):
        await store.commit(lease, a_round(9, 6, 7))


async def test_a_repair_beyond_the_log_is_refused(store: SessionStore, session_id: str, lease: Lease) -> None:
    with pytest.raises(SessionLost):
        await store.repair(lease, base_len=4, token_ids=tokens(5))
    assert await held_tokens(store, session_id) == [1, 2, 3]


# ---- forgetting -------------------------------------------------------------------------------------------------


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


# ---- a Redis that fails -----------------------------------------------------------------------------------------


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


async def test_epochs_never_go_back_after_everything_was_lost(tmp_path_factory: pytest.TempPathFactory) -> None:
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


async def test_one_store_serves_many_sessions_at_once(store: SessionStore, session_id: str) -> None:
    async def run_session(number: int) -> list[int]:
        name = f"{session_id}-{number}"
        lease = await store.acquire(name, owner=f"owner-{number}", ttl_s=LONG_TTL_S, create=True)
        await store.begin_request(lease, REQUEST, keep=0, token_ids=tokens(number))
        for round_id in range(5):
            await store.commit(lease, a_round(round_id, 1 + round_id, number + round_id))
        await store.release(lease)
        return await held_tokens(store, name)

    logs = await asyncio.gather(*(run_session(number) for number in range(20)))
    assert logs == [[number, *range(number, number + 5)] for number in range(20)]


async def test_commits_sent_together_succeed_and_fail_each_by_itself(store: SessionStore, session_id: str) -> None:
    mine = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    other = f"{session_id}-other"
    lost = await store.acquire(other, owner="me", ttl_s=LONG_TTL_S, create=True)
    await store.release(lost)
    answers = await store.commit_all([(lost, a_round(0, 0, 7)), (mine, a_round(0, 0, 8)), (mine, a_round(1, 9, 9))])
    assert isinstance(answers[0], LeaseLost)
    assert answers[1] is None
    assert isinstance(answers[2], SessionLost)
    assert await held_tokens(store, session_id) == [8]
    await store.delete(other)
