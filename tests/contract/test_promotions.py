"""Promotion of a draft pool: its share grows in steps, a slower pool is rolled back, coordinators share the
decision."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator, Callable
from math import exp

import numpy as np
import pytest

from coordinator.replicas.store_watch import Activity
from coordinator.routing.promotion import LEAST_TOKENS, LOOKS, STAGES, Canary, Sample, is_worse, next_share
from specdec.contract.errors import Internal
from specdec.settings.pool_names import MAX_POOL_NAME_CHARS
from specdec.state.redis_store import RedisSessionStore, open_store
from specdec.state.store import PromotionRecord, PromotionStatus
from tests.support.redis_fixture import RedisServer

SPREAD = 0.2


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[RedisSessionStore]:
    opened = open_store(store_url, tenant=f"t{secrets.token_hex(4)}")
    yield opened
    await opened.close()


async def ask(canary: Canary, generator: np.random.Generator, count: int, *, slower: float = 0.0) -> None:
    """Run a number of requests in separate sessions; the pool's requests are slower by `slower` in log tokens a
    second."""
    for _ in range(count):
        pool = canary.pool_of(generator.bytes(8).hex())
        rate = exp(generator.normal(4.0 - (slower if pool else 0.0), SPREAD))
        canary.observe(pool, 100, 100 / rate)


async def follow(canary: Canary, generator: np.random.Generator, *, slower: float = 0.0) -> list[tuple[float, str]]:
    """Return shares and states until the promotion is done or rolled back."""
    seen = []
    while canary.promotion is not None:
        state = (canary.promotion.share, canary.promotion.status.value)
        if not seen or state != seen[-1]:
            seen.append(state)
        if canary.promotion.status is not PromotionStatus.RUNNING:
            return seen
        await ask(canary, generator, 50, slower=slower)
        await canary.sync_with_store()
    return seen


async def eventually(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.01)


async def test_an_equally_fast_pool_reaches_all_sessions_in_steps(store: RedisSessionStore) -> None:
    canary = Canary(store.promotions())
    await canary.promote("new", 1.0)
    assert await follow(canary, np.random.default_rng(1)) == [
        (0.01, "running"), (0.05, "running"), (0.25, "running"), (1.0, "done"),
    ]  # fmt: skip
    assert all(canary.pool_of(f"s{index}") == "new" for index in range(50))


async def test_a_slower_pool_is_rolled_back_automatically(store: RedisSessionStore) -> None:
    canary = Canary(store.promotions())
    await canary.promote("new", 1.0)
    assert await follow(canary, np.random.default_rng(1), slower=0.4) == [(0.01, "running"), (0.01, "rolled_back")]
    assert not any(canary.pool_of(f"s{index}") for index in range(1000))


async def test_short_requests_and_those_of_an_earlier_promotion_are_not_compared(store: RedisSessionStore) -> None:
    canary = Canary(store.promotions())
    await canary.promote("new", 1.0)
    for _ in range(100):
        canary.observe("old", 100, 1e4)
        canary.observe("new", LEAST_TOKENS - 1, 1e4)
        canary.observe("", LEAST_TOKENS - 1, 1e-4)
    assert (await follow(canary, np.random.default_rng(1)))[-1] == (1.0, "done")


def test_an_equal_pool_is_rolled_back_in_less_than_one_of_a_hundred_promotions() -> None:
    """Among 2,000 promotions of an equal pool, 20 roll-backs would be one in a hundred; the limit is well below."""
    generator, num_back = np.random.default_rng(5), 0
    for _ in range(2000):
        back = False
        for needed in STAGES.values():
            pool, others = Sample(), Sample()
            for count, (of_pool, of_others) in enumerate(generator.normal(0.0, SPREAD, (needed, 2)), 1):
                pool.add(of_pool)
                others.add(of_others)
                back = back or (count in LOOKS and is_worse(pool, others))
        num_back += back
    assert num_back <= 20


async def test_coordinators_share_a_promotion_and_a_later_one_continues_it(
    store: RedisSessionStore,
) -> None:
    first, second = Canary(store.promotions()), Canary(store.promotions())
    await first.promote("new", 0.05)
    await second.sync_with_store()
    assert second.promotion == PromotionRecord("new", 0.01, 0.05, PromotionStatus.RUNNING)
    sessions = [f"s{index}" for index in range(2000)]
    assert [*map(first.pool_of, sessions)] == [*map(second.pool_of, sessions)]
    await follow(second, np.random.default_rng(2))
    await ask(first, np.random.default_rng(3), 4000, slower=0.4)  # what it decides comes too late: it is there
    await first.sync_with_store()
    later = Canary(store.promotions())
    await later.sync_with_store()
    assert first.promotion == later.promotion == PromotionRecord("new", 0.05, 0.05, PromotionStatus.DONE)
    await later.promote("new", 0.0)
    await first.sync_with_store()
    assert first.promotion is None


async def write(store: RedisSessionStore, record: bytes) -> None:
    """Store a value that no coordinator wrote."""
    await store._connection.run_command("SET", f"specdec:{store._tenant}:promotion", record)


async def test_an_invalid_record_is_refused_with_the_reason_and_can_be_replaced(store: RedisSessionStore) -> None:
    canary = Canary(store.promotions())
    for record in (
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"pool": "", "share": 1, "most": 1, "status": "done"}',
        b'{"pool": "a", "share": 2, "most": 1, "status": "done"}',
        b'{"pool": "a", "share": NaN, "most": 1, "status": "done"}',
        b'{"pool": "a", "share": 1' + b"0" * 400 + b', "most": 1, "status": "done"}',
        b'{"pool": "\\ud800", "share": 1, "most": 1, "status": "done"}',
        b'{"pool": "\\u001b[2J", "share": 1, "most": 1, "status": "done"}',
        b'{"pool": "' + b"a" * 1_000_000 + b'", "share": 1, "most": 1, "status": "done"}',
        b'{"pool": {"a": 1}, "share": 1, "most": 1, "status": "done"}',
        b'{"pool": "a", "share": 1, "most": 1, "status": ["done"]}',
    ):
        await write(store, record)
        with pytest.raises(Internal, match="promote a draft pool again"):
            await canary.sync_with_store()
        assert await canary.promote("new", 1.0) is not None


async def test_a_pool_of_the_longest_name_is_promoted(store: RedisSessionStore) -> None:
    name, canary = "\N{EVERGREEN TREE}" * MAX_POOL_NAME_CHARS, Canary(store.promotions())
    await Canary(store.promotions()).promote(name, 1.0)
    await canary.sync_with_store()
    assert canary.promotion == PromotionRecord(name, 0.01, 1.0, PromotionStatus.RUNNING)


async def test_an_invalid_record_is_logged_once_and_later_ones_are_followed(
    store: RedisSessionStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.replicas.store_watch.POLL_S", 0.01)
    await write(store, b"[" * 100_000)
    canary = Canary(store.promotions())
    canary.start(Activity(lambda: None))
    async with asyncio.timeout(20):
        await eventually(lambda: bool(caplog.records))
        await asyncio.sleep(0.1)
        await store.promotions().put(PromotionRecord("new", 0.01, 1.0, PromotionStatus.RUNNING))
        await eventually(lambda: canary.promotion is not None)
    await canary.close()
    assert [record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()] == [
        "promotion not synchronised: the promotion record in the store cannot be read; promote a draft pool again"
    ]


def test_shares_end_at_the_requested_share() -> None:
    assert [next_share(share, 1.0) for share in (0.0, 0.01, 0.05, 0.25)] == [0.01, 0.05, 0.25, 1.0]
    assert next_share(0.0, 0.005) == 0.005
    assert next_share(0.01, 0.03) == 0.03


@pytest.mark.parametrize("turns", range(0, 40, 3))
async def test_a_promotion_ends_at_any_point_when_it_is_closed(
    redis_server: RedisServer, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.replicas.store_watch.POLL_S", 1e-6)
    store = open_store(redis_server.url)
    canary = Canary(store.promotions())
    canary.start(Activity(lambda: None))
    for _ in range(turns):
        await asyncio.sleep(0)
    closing = asyncio.create_task(canary.close())
    done, _ = await asyncio.wait([closing], timeout=20)
    assert done, "it goes on for ever"
    await store.close()


async def test_a_decision_made_while_the_store_hung_is_published_afterwards(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.replicas.store_watch.POLL_S", 0.01)
    store = open_store(redis_server.url, tenant=f"t{secrets.token_hex(4)}")
    canary, num_tasks = Canary(store.promotions()), len(asyncio.all_tasks())
    await canary.promote("new", 1.0)
    canary.start(Activity(lambda: None))
    generator = np.random.default_rng(1)
    redis_server.signal(signal.SIGSTOP)
    try:
        for _ in range(20):
            await ask(canary, generator, 500, slower=0.4)
            assert canary.pool_of("s") in ("", "new")
            await asyncio.sleep(0.15)  # longer than the time limit of a command
        assert canary.promotion == PromotionRecord("new", 0.01, 1.0, PromotionStatus.RUNNING)
        assert len(asyncio.all_tasks()) <= num_tasks + 3
    finally:
        redis_server.signal(signal.SIGCONT)
    async with asyncio.timeout(30):
        await eventually(lambda: canary.promotion.status is not PromotionStatus.RUNNING)
    later = Canary(store.promotions())
    await later.sync_with_store()
    assert canary.promotion == later.promotion == PromotionRecord("new", 0.01, 1.0, PromotionStatus.ROLLED_BACK)
    await canary.close()
    await store.close()
