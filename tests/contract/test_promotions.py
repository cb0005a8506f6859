"""A draft pool on its way to all sessions: share by share, back where it is slower, decided once for all."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from math import exp

import numpy as np
import pytest

from coordinator.routing.promotion import LOOKS, STAGES, Canary, Sample, is_worse, next_share
from specdec.errors import Internal
from specdec.state.redis_store import RedisSessionStore, open_store
from specdec.state.store import Promotion, PromotionStatus

SPREAD = 0.2


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[RedisSessionStore]:
    opened = open_store(store_url, tenant=f"t{secrets.token_hex(4)}")
    yield opened
    await opened.close()


async def ask(canary: Canary, generator: np.random.Generator, count: int, *, slower: float = 0.0) -> None:
    """So many requests, of sessions of their own; the pool's make `slower` fewer log tokens a second."""
    for _ in range(count):
        pool = canary.pool_of(secrets.token_hex(8))
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


async def test_a_record_that_is_none_is_refused_by_name_and_can_be_replaced(store: RedisSessionStore) -> None:
    canary = Canary(store.promotions())
    for record in (
        b"{",
        b"[]",
        b'{"pool": "", "share": 1, "most": 1, "status": "done"}',
        b'{"pool": "a", "share": 2, "most": 1, "status": "done"}',
    ):
        await store._connection.run_command("SET", f"specdec:{store._tenant}:promotion", record)
        with pytest.raises(Internal, match="promote one anew"):
            await canary.look_at_store()
        assert await canary.promote("new", 1.0) is not None


def test_shares_end_at_what_was_asked_for() -> None:
    assert [next_share(share, 1.0) for share in (0.0, 0.01, 0.05, 0.25)] == [0.01, 0.05, 0.25, 1.0]
    assert next_share(0.0, 0.005) == 0.005
    assert next_share(0.01, 0.03) == 0.03
