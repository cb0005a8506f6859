"""Usage records and limits on a Redis Cluster, where each slot has a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from specdec.state.redis_store import RedisSessionStore
from tests.contract.test_shared_quotas import (
    processes,
    test_requests_a_minute_refill_evenly_and_a_refusal_says_when,
    test_streams_of_all_processes_count_and_an_ended_one_is_free_at_once,
)
from tests.contract.test_usage_records import (
    begin,
    finish,
    short_lived,
    store,
    test_a_deletion_ends_an_unfinished_turn_and_adds_nothing_to_a_finished_one,
    test_a_finished_turn_has_one_record_with_what_its_client_was_told,
    test_a_turn_that_another_owner_finishes_has_one_record,
    test_the_next_turn_ends_an_unfinished_one_before_it_cuts_its_tokens,
    usage_of,
)
from tests.support.redis_systems import RedisCluster, redis_cluster

#: Conformance tests that run here too, and their fixtures.
__all__ = [
    "processes",
    "store",
    "test_a_deletion_ends_an_unfinished_turn_and_adds_nothing_to_a_finished_one",
    "test_a_finished_turn_has_one_record_with_what_its_client_was_told",
    "test_a_turn_that_another_owner_finishes_has_one_record",
    "test_requests_a_minute_refill_evenly_and_a_refusal_says_when",
    "test_streams_of_all_processes_count_and_an_ended_one_is_free_at_once",
    "test_the_next_turn_ends_an_unfinished_one_before_it_cuts_its_tokens",
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def store_url(cluster: RedisCluster) -> str:
    return cluster.url


async def test_sessions_of_many_slots_are_recorded_expired_ones_too(store: RedisSessionStore, store_url: str) -> None:
    for index in range(20):
        await finish(store, f"whole-{index}")
    short = short_lived(store, store_url)
    for index in range(5):
        await short.release(await begin(short, f"left-{index}"))
    for index in range(5):
        session_id = f"left-{index}"
        async with asyncio.timeout(10):
            while await short.load(session_id) is not None:
                pass
    num_recorded = 0
    async with asyncio.timeout(60):
        while num_recorded < 5:
            num_recorded += await store.usage().record_expired()
    outcomes = [record.outcome for record in await usage_of(store)]
    assert (outcomes.count("stop"), outcomes.count("broken")) == (20, 5)
    assert await store.usage().first_ms() > 0
    await short.close()
