"""Usage records: each turn that ends gets one, in the same step as its end, also if it is never resumed."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from specdec.contract.errors import LeaseLost, NotFound
from specdec.contract.payer import Payer
from specdec.contract.types import FinishReason
from specdec.state.connection import RedisConnection
from specdec.state.redis_store import RedisSessionStore
from specdec.state.store import Commit, Lease, RequestRecord
from specdec.state.usage_records import UsageRecord
from tests.support.store_sessions import LONG_TTL_S, tokens

KEPT_S = 100.0
DAY_S = 86_400.0
SESSION_TTL_S = 0.3
ALWAYS_MS = 1 << 45

REQUEST = RequestRecord(
    "r-1", "digest", "{}", turn=0, output_start=3, payer=Payer("0123456789abcdef", "a-model")
)  # fmt: skip
STATS = '{"num_rounds":1,"num_draft_tokens":8,"num_accepted_tokens":5,"num_cached_prompt_tokens":2}'


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[RedisSessionStore]:
    store = RedisSessionStore(store_url, cluster=f"c{uuid.uuid4().hex[:20]}", usage_kept_s=KEPT_S)
    yield store
    await store.close()


def a_round(round_id: int, base_len: int, *token_ids: int, reason: FinishReason | None = None) -> Commit:
    return Commit(round_id, base_len, tokens(*token_ids), STATS, reason, repr((base_len, token_ids)).encode())


async def begin(
    store: RedisSessionStore, session_id: str = "s", request: RequestRecord = REQUEST, *, owner: str = "me"
) -> Lease:
    """Begin a turn after the tokens that the session holds, with a prompt of as many as it lacks."""
    lease = await store.acquire(session_id, owner=owner, ttl_s=LONG_TTL_S, create=True)
    record = await store.load(session_id)
    held = record.num_tokens if record else 0
    new = range(request.output_start - held)
    await store.begin_request(lease, request, keep=held, token_ids=tokens(*new))
    return lease


def records_key(store: RedisSessionStore) -> str:
    return f"specdec@{store._cluster}:usage:{{0}}:records"


async def usage_of(store: RedisSessionStore) -> list[UsageRecord]:
    return [record async for record in store.usage().read(0, ALWAYS_MS)]


async def test_a_finished_turn_has_one_record_with_what_its_client_was_told(store: RedisSessionStore) -> None:
    lease = await begin(store.of_tenant("acme"))
    await store.commit(lease, a_round(0, 3, 4, 5))
    assert not await usage_of(store)
    last = a_round(1, 5, 6, 7, reason=FinishReason.LENGTH)
    await store.commit(lease, last)
    await store.commit(lease, last)  # the answer of the first attempt was lost
    (record,) = await usage_of(store)
    assert record == UsageRecord(
        record.time_ms, "acme", "0123456789abcdef", "a-model", "s", "r-1", 3, 2, 4, 8, 5, "length"
    )
    assert abs(record.time_ms - await store.usage().server_ms()) < 60_000


async def test_a_turn_that_another_owner_finishes_has_one_record(store: RedisSessionStore) -> None:
    lease = await begin(store)
    await store.commit(lease, a_round(0, 3, 4, 5))
    await store.release(lease, left=False)
    other = await store.acquire("s", owner="other", ttl_s=LONG_TTL_S, create=False)
    await store.begin_request(other, REQUEST, keep=5, token_ids=tokens())
    last = a_round(1, 5, 6, reason=FinishReason.STOP)
    with pytest.raises(LeaseLost):
        await store.commit(lease, last)
    await store.commit(other, last)
    assert [(record.output_tokens, record.outcome) for record in await usage_of(store)] == [(3, "stop")]


async def test_the_next_turn_ends_an_unfinished_one_before_it_cuts_its_tokens(store: RedisSessionStore) -> None:
    lease = await begin(store)
    await store.commit(lease, a_round(0, 3, 4, 5, 6, 7))
    second = replace(REQUEST, request_id="r-2", turn=1, output_start=4)
    await store.begin_request(lease, second, keep=3, token_ids=tokens(9))
    await store.commit(lease, a_round(1, 4, 5, reason=FinishReason.STOP))
    records = [(record.request, record.output_tokens, record.outcome) for record in await usage_of(store)]
    assert records == [("r-1", 4, "broken"), ("r-2", 1, "stop")]


async def test_a_deletion_ends_an_unfinished_turn_and_adds_nothing_to_a_finished_one(store: RedisSessionStore) -> None:
    lease = await begin(store)
    await store.commit(lease, a_round(0, 3, 4))
    await store.delete("s")
    await store.delete("s")
    with pytest.raises(NotFound):
        await store.commit(lease, a_round(1, 4, 5, reason=FinishReason.STOP))
    lease = await begin(store)
    await store.commit(lease, a_round(0, 3, reason=FinishReason.STOP))
    await store.delete("s")
    assert [(record.output_tokens, record.outcome) for record in await usage_of(store)] == [(1, "broken"), (0, "stop")]


async def test_a_discarded_session_has_no_record(store: RedisSessionStore, store_url: str) -> None:
    lease = await begin(store)
    await store.discard(lease)
    assert not await usage_of(store)
    assert not await open_turns(store, store_url)


async def test_a_turn_that_nobody_resumes_gets_its_record_once_its_session_has_expired(
    store: RedisSessionStore, store_url: str
) -> None:
    short = short_lived(store, store_url)
    lease = await begin(short)
    await short.commit(lease, a_round(0, 3, 4, 5))
    await short.release(lease)
    assert await store.usage().record_expired() == 0
    await until_expired(short)
    assert await short.load("s") is None
    num_recorded = 0
    async with asyncio.timeout(10):
        while not num_recorded:
            num_recorded = await store.usage().record_expired()
    assert num_recorded == 1
    assert await store.usage().record_expired() == 0
    assert [(record.output_tokens, record.outcome) for record in await usage_of(store)] == [(2, "broken")]
    assert not await open_turns(store, store_url)
    await short.close()


async def test_a_damaged_session_does_not_hold_up_the_records_of_others(
    store: RedisSessionStore, store_url: str
) -> None:
    short = short_lived(store, store_url)
    for session_id in ("damaged", "whole"):
        await short.release(await begin(short, session_id))
    await until_expired(short)
    raw = RedisConnection(store_url)
    await raw.run_command("SET", f"specdec@{store._cluster}:default:{{damaged}}:meta", "text")
    async with asyncio.timeout(10):
        while not await usage_of(store) or await open_turns(store, store_url):
            await store.usage().record_expired()
    assert [record.session for record in await usage_of(store)] == ["whole"]
    await raw.close()
    await short.close()


async def test_a_session_that_is_created_again_first_ends_the_turn_of_the_expired_one(
    store: RedisSessionStore, store_url: str
) -> None:
    short = short_lived(store, store_url)
    lease = await begin(short)
    await short.commit(lease, a_round(0, 3, 4, 5))
    await short.release(lease)
    await until_expired(short)
    with pytest.raises(NotFound):
        await short.acquire("s", owner="me", ttl_s=1.0, create=False)
    lease = await begin(short)
    assert (await short.load("s")).round_id == 0  # type: ignore[union-attr]
    await short.commit(lease, a_round(0, 3, 7, reason=FinishReason.STOP))
    assert [(record.output_tokens, record.outcome) for record in await usage_of(store)] == [(2, "broken"), (1, "stop")]
    await short.close()


async def test_a_session_in_use_is_looked_at_again_and_not_ended(store: RedisSessionStore, store_url: str) -> None:
    short = short_lived(store, store_url)
    lease = await begin(short)
    long = RedisSessionStore(store_url, cluster=store._cluster, usage_kept_s=KEPT_S)
    await long.renew(lease)  # its session now lives for an hour
    await asyncio.sleep(2 * SESSION_TTL_S)
    assert await store.usage().record_expired() == 0
    assert len(await open_turns(store, store_url)) == 1
    await long.commit(lease, a_round(0, 3, 4, reason=FinishReason.STOP))
    assert [record.outcome for record in await usage_of(store)] == ["stop"]
    await short.close()
    await long.close()


async def test_a_finished_turn_that_the_store_lost_is_recorded_when_it_is_written_again(
    store: RedisSessionStore,
) -> None:
    lease = await begin(store)
    ended = replace(REQUEST, finish_reason=FinishReason.STOP, stats_json=STATS)
    await store.begin_request(lease, ended, keep=3, token_ids=tokens(4, 5))
    await store.begin_request(lease, ended, keep=5, token_ids=tokens())
    assert [(record.output_tokens, record.draft_tokens) for record in await usage_of(store)] == [(2, 8)]


async def test_a_second_record_of_the_same_turn_is_not_read(store: RedisSessionStore, store_url: str) -> None:
    lease = await begin(store)
    await store.commit(lease, a_round(0, 3, 4, reason=FinishReason.STOP))
    raw = RedisConnection(store_url)
    key = records_key(store)
    ((_, fields),) = await raw.run_command("XRANGE", key, "-", "+")
    flat = [part for pair in fields.items() for part in pair] if isinstance(fields, dict) else fields
    await raw.run_command("XADD", key, "*", *flat)
    await raw.close()
    assert len(await usage_of(store)) == 1


async def test_old_records_are_removed_once_the_clocks_of_store_and_coordinator_agree(
    store: RedisSessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = store.usage()
    assert await usage.first_ms() == 0
    for index in range(3):
        await finish(store, f"s{index}")
    assert await usage.first_ms() > 0
    await asyncio.sleep(0.01)
    now_s = time.time()
    with monkeypatch.context() as behind:  # the store's clock is a month ahead of this process's
        behind.setattr(time, "time", lambda: now_s - 30 * DAY_S)
        await usage.note_kept(0.001)
        await usage.trim()
    assert len(await usage_of(store)) == 3
    await usage.note_kept(0.001)
    await usage.trim()
    assert await usage.first_ms() == 0


async def test_after_the_clock_was_set_back_records_have_the_right_time(
    store: RedisSessionStore, store_url: str
) -> None:
    usage = store.usage()
    ahead_ms = await usage.server_ms() + round(30 * DAY_S * 1000)
    await finish(store, "before")
    raw = RedisConnection(store_url)
    ((_, flat),) = await raw.run_command("XRANGE", records_key(store), "-", "+")
    fields = dict(zip(flat[::2], flat[1::2], strict=True)) if isinstance(flat, list) else flat
    during = {**fields, b"session": b"during", b"time": str(ahead_ms).encode()}
    await raw.run_command("XADD", records_key(store), ahead_ms, *(part for pair in during.items() for part in pair))
    await raw.run_command("SET", f"specdec@{store._cluster}:usage:kept", f"100000 {ahead_ms - 100_000}")
    await raw.close()
    await usage.note_kept(KEPT_S)
    await finish(store, "after")
    now_ms = await usage.server_ms()
    read = [record.session async for record in usage.read(now_ms - 60_000, now_ms + 1)]
    assert read == ["before", "after"]
    _, begin_ms = await usage.kept()
    assert abs(now_ms - KEPT_S * 1000 - begin_ms) < 60_000


async def test_a_turn_of_before_the_time_was_raised_shortens_nothing(store: RedisSessionStore, store_url: str) -> None:
    short = RedisSessionStore(store_url, cluster=store._cluster, usage_kept_s=0.001)
    lease = await begin(short, "open")
    await finish(store, "s")
    await asyncio.sleep(0.01)
    await short.commit(lease, a_round(0, 3, 4, reason=FinishReason.STOP))
    raw = RedisConnection(store_url)
    assert await raw.run_command("PTTL", records_key(store)) > 90 * DAY_S * 1000
    assert len(await usage_of(store)) == 2
    await raw.close()
    await short.close()


async def test_a_store_without_memory_deletes_a_session_with_an_open_turn(redis_url: str) -> None:
    store = RedisSessionStore(redis_url, usage_kept_s=KEPT_S)
    await begin(store)
    raw = RedisConnection(redis_url)
    try:
        await raw.run_command("CONFIG", "SET", "maxmemory", 1)
        await store.delete("s")
    finally:
        await raw.run_command("CONFIG", "SET", "maxmemory", 0)
        await raw.close()
    assert [record.outcome for record in await usage_of(store)] == ["broken"]
    await store.close()


async def test_a_turn_that_an_older_coordinator_began_is_not_recorded_for_the_key_before(
    store: RedisSessionStore, store_url: str
) -> None:
    lease = await begin(store)
    raw = RedisConnection(store_url)
    meta = f"specdec@{store._cluster}:default:{{s}}:meta"
    await raw.run_command("HSET", meta, "request_id", "r-2", "turn", 1)  # it knows no other field of a record
    await raw.close()
    third = replace(REQUEST, request_id="r-3", turn=2)
    await store.begin_request(lease, third, keep=3, token_ids=tokens())
    await store.commit(lease, a_round(0, 3, 4, reason=FinishReason.STOP))
    assert [record.request for record in await usage_of(store)] == ["r-3"]


async def test_without_a_time_to_keep_them_no_records_are_written(store_url: str) -> None:
    store = RedisSessionStore(store_url, cluster=f"c{uuid.uuid4().hex[:20]}")
    await finish(store, "s")
    assert not await usage_of(store)
    assert not await open_turns(store, store_url)
    await store.close()


async def test_a_longer_time_to_keep_records_brings_none_back(store: RedisSessionStore) -> None:
    usage = store.usage()
    assert await usage.kept() == (0, 0)
    await usage.note_kept(0.5)
    short_ms, begin_ms = await usage.kept()
    await usage.note_kept(1000.0)
    long_ms, same_ms = await usage.kept()
    assert (short_ms, long_ms) == (500, 1_000_000)
    assert same_ms == begin_ms


async def finish(store: RedisSessionStore, session_id: str) -> None:
    """Run a whole turn of one token."""
    lease = await begin(store, session_id)
    await store.commit(lease, a_round(0, 3, 4, reason=FinishReason.STOP))


def short_lived(store: RedisSessionStore, store_url: str) -> RedisSessionStore:
    """Return the same store, whose sessions expire soon."""
    return RedisSessionStore(store_url, cluster=store._cluster, session_ttl_s=SESSION_TTL_S, usage_kept_s=KEPT_S)


async def until_expired(store: RedisSessionStore) -> None:
    async with asyncio.timeout(10):
        while await store.load("s") is not None:
            pass


async def open_turns(store: RedisSessionStore, store_url: str) -> list[bytes]:
    raw = RedisConnection(store_url)
    try:
        found: list[bytes] = await raw.run_command("ZRANGE", f"specdec@{store._cluster}:usage:{{0}}:open", 0, -1)
        return found
    finally:
        await raw.close()
