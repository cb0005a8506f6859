"""The commit queue: an error of one generation's commit does not affect others."""

import asyncio

import numpy as np
import pytest

from coordinator.generation.publisher import CommitQueue
from specdec.errors import LeaseLost
from specdec.state.redis_store import open_store
from specdec.state.store import Commit, Lease


async def test_a_refused_or_cancelled_commit_does_not_affect_the_others_of_its_batch() -> None:
    store = open_store("memory://")
    lease = await store.acquire("session", owner="owner", ttl_s=30.0, create=True)
    commit = Commit(round_id=0, base_len=0, token_ids=np.array([1], np.uint32), stats_json="{}", finish_reason=None)
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
