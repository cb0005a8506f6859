"""The commit queue: an error of one generation's commit does not affect others."""

import asyncio

import pytest

from coordinator.generation.publisher import CommitQueue
from specdec.contract.errors import LeaseLost
from specdec.state.redis_store import open_store
from specdec.state.store import Lease
from tests.support.store_sessions import a_round, take_over


async def test_a_refused_or_cancelled_commit_does_not_affect_the_others_of_its_batch() -> None:
    store = open_store("memory://")
    lease = await store.acquire("session", owner="owner", ttl_s=30.0, create=True)
    await take_over(store, lease, 0)
    commit = a_round(0, 0, 1)
    queue = CommitQueue(store)

    given_up = queue.add(lease, commit)
    given_up.cancel()
    refused = queue.add(Lease("session", "owner", lease.epoch - 1, 30.0), commit)
    taken = queue.add(lease, commit)
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(refused, 5)
    await asyncio.wait_for(taken, 5)
    assert (await store.read_tokens("session")).tolist() == [1]
    await store.close()
