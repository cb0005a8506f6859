"""A draft pool on its way to all sessions: share by share, back where it is slower, decided once for all."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator, Callable
from math import exp

import numpy as np
import pytest

from coordinator.routing.promotion import LEAST_TOKENS, LOOKS, STAGES, Canary, Sample, is_worse, next_share
from specdec.errors import Internal
from specdec.settings.pool_names import MAX_POOL_NAME_CHARS
from specdec.state.redis_store import RedisSessionStore, open_store
from specdec.state.store import Promotion, PromotionStatus
from tests.support.redis_fixture import RedisServer

SPREAD = 0.2


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[RedisSessionStore]:
    opened = open_store(store_url, tenant=f"t{secrets.token_hex(4)}")
    yield opened
    await opened.close()


async def ask(canary: Canary, generator: np.random.Generator, count: int, *, slower: float = 0.0) -> None:
    """So many requests, of sessions of their own; the pool's make `slower` fewer log tokens a second."""
    for _ in range(count):
        pool = canary.pool_of(generator.bytes(8).hex())
        rate = exp(generator.normal(4.0 - (slower if pool else 0.0), SPREAD))
        canary.observe(pool, 100, 100 / rate)


async def follow(canary: Canary, generator: np.random.Generator, *, slower: float = 0.0) -> list[tuple[float, str]]:
    """Shares and states until it is there or back."""
    seen = []
    while canary.promotion is not None:
        state = (canary.promotion.share, canary.promotion.status.value)
        if not seen or state != seen[-1]:
            seen.append(state)
        if canary.promotion.status is not PromotionStatus.RUNNING:
            return seen
        await ask(canary, generator, 50, slower=slower)
        await canary.look_at_store()
    return seen


async def eventually(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.01)


async def test_a_pool_that_is_as_good_comes_to_all_sessions_share_by_share(store: RedisSessionStore) -> None:
    canary = Canary(store.promotions())
    await canary.promote("new", 1.0)
    assert await follow(canary, np.random.default_rng(1)) == [
        (0.01, "running"), (0.05, "running"), (0.25, "running"), (1.0, "done"),
    ]  # fmt: skip
    assert all(canary.pool_of(f"s{index}") == "new" for index in range(50))


async def test_a_pool_that_is_slower_goes_back_by_itself(store: RedisSessionStore) -> None:
    canary = Canary(store.promotions())
    await canary.promote("new", 1.0)
    assert await follow(canary, np.random.default_rng(1), slower=0.4) == [(0.01, "running"), (0.01, "rolled_back")]
    assert not any(canary.pool_of(f"s{index}") for index in range(1000))


async def test_short_requests_and_those_of_a_promotion_before_are_not_compared(store: RedisSessionStore) -> None:
    canary = Canary(store.promotions())
    await canary.promote("new", 1.0)
    for _ in range(100):
        canary.observe("old", 100, 1e4)
        canary.observe("new", LEAST_TOKENS - 1, 1e4)
        canary.observe("", LEAST_TOKENS - 1, 1e-4)
    assert (await follow(canary, np.random.default_rng(1)))[-1] == (1.0, "done")


def test_an_equal_pool_goes_back_by_chance_less_often_than_once_in_a_hundred_promotions() -> None:
    """2,000 promotions of an equal pool: 20 would be one in a hundred, which the limit stays well below."""
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


async def test_coordinators_share_a_promotion_and_one_that_starts_later_goes_on_with_it(
    store: RedisSessionStore,
) -> None:
    first, second = Canary(store.promotions()), Canary(store.promotions())
    await first.promote("new", 0.05)
    await second.look_at_store()
    assert second.promotion == Promotion("new", 0.01, 0.05, PromotionStatus.RUNNING)
    sessions = [f"s{index}" for index in range(2000)]
    assert [*map(first.pool_of, sessions)] == [*map(second.pool_of, sessions)]
    await follow(second, np.random.default_rng(2))
    await ask(first, np.random.default_rng(3), 4000, slower=0.4)  # what it decides comes too late: it is there
    await first.look_at_store()
    later = Canary(store.promotions())
    await later.look_at_store()
    assert first.promotion == later.promotion == Promotion("new", 0.05, 0.05, PromotionStatus.DONE)
    await later.promote("new", 0.0)
    await first.look_at_store()
    assert first.promotion is None


async def write(store: RedisSessionStore, record: bytes) -> None:
    """Puts there what no coordinator wrote."""
    await store._connection.run_command("SET", f"specdec:{store._tenant}:promotion", record)


async def test_a_record_that_is_none_is_refused_by_name_and_can_be_replaced(store: RedisSessionStore) -> None:
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
            await canary.look_at_store()
        assert await canary.promote("new", 1.0) is not None


async def test_a_pool_of_the_longest_name_is_promoted(store: RedisSessionStore) -> None:
    name, canary = "\N{EVERGREEN TREE}" * MAX_POOL_NAME_CHARS, Canary(store.promotions())
    await Canary(store.promotions()).promote(name, 1.0)
    await canary.look_at_store()
    assert canary.promotion == Promotion(name, 0.01, 1.0, PromotionStatus.RUNNING)


async def test_a_record_that_is_none_is_told_once_and_what_follows_it_is_followed(
    store: RedisSessionStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.routing.promotion.POLL_S", 0.01)
    await write(store, b"[" * 100_000)
    canary = Canary(store.promotions())
    canary.start()
    async with asyncio.timeout(20):
        await eventually(lambda: bool(caplog.records))
        await asyncio.sleep(0.1)
        await store.promotions().put(Promotion("new", 0.01, 1.0, PromotionStatus.RUNNING))
        await eventually(lambda: canary.promotion is not None)
    await canary.close()
    assert [record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()] == [
        "the promotion record in the store cannot be read; promote a draft pool again"
    ]


def test_shares_end_at_what_was_asked_for() -> None:
    assert [next_share(share, 1.0) for share in (0.0, 0.01, 0.05, 0.25)] == [0.01, 0.05, 0.25, 1.0]
    assert next_share(0.0, 0.005) == 0.005
    assert next_share(0.01, 0.03) == 0.03


@pytest.mark.parametrize("turns", range(0, 40, 3))
async def test_whatever_it_is_at_it_ends_when_it_is_closed(
    redis_server: RedisServer, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.routing.promotion.POLL_S", 0.0)
    store = open_store(redis_server.url)
    canary = Canary(store.promotions())
    canary.start()
    for _ in range(turns):
        await asyncio.sleep(0)
    closing = asyncio.create_task(canary.close())
    done, _ = await asyncio.wait([closing], timeout=20)
    assert done, "it goes on for ever"
    await store.close()


async def test_what_was_decided_while_the_store_stood_still_is_told_once_it_moves(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.routing.promotion.POLL_S", 0.01)
    store = open_store(redis_server.url, tenant=f"t{secrets.token_hex(4)}")
    canary, num_tasks = Canary(store.promotions()), len(asyncio.all_tasks())
    await canary.promote("new", 1.0)
    canary.start()
    generator = np.random.default_rng(1)
    redis_server.signal(signal.SIGSTOP)
    try:
        for _ in range(20):
            await ask(canary, generator, 500, slower=0.4)
            assert canary.pool_of("s") in ("", "new")
            await asyncio.sleep(0.15)  # beyond what one command waits for
        assert canary.promotion == Promotion("new", 0.01, 1.0, PromotionStatus.RUNNING)
        assert len(asyncio.all_tasks()) <= num_tasks + 3
    finally:
        redis_server.signal(signal.SIGCONT)
    async with asyncio.timeout(30):
        await eventually(lambda: canary.promotion.status is not PromotionStatus.RUNNING)
    later = Canary(store.promotions())
    await later.look_at_store()
    assert canary.promotion == later.promotion == Promotion("new", 0.01, 1.0, PromotionStatus.ROLLED_BACK)
    await canary.close()
    await store.close()
