"""The queue of commits: one generation's trouble is not another's."""

import asyncio

import numpy as np

from coordinator.generation.commits import CommitQueue
from specdec.errors import LeaseLost
from specdec.state.redis_store import open_store
from specdec.state.store import Commit, Lease


async def test_a_listener_that_fails_leaves_the_others_of_its_batch_their_answers() -> None:
    store = open_store("memory://")
    lease = await store.acquire("session", owner="owner", ttl_s=30.0, create=True)
    commit = Commit(round_id=1, base_len=0, token_ids=np.array([1], np.uint32), stats_json="{}", finish_reason=None)
    queue, refusal = CommitQueue(store), asyncio.get_running_loop().create_future()

    def fail(error: Exception | None) -> None:
        raise RuntimeError("a listener's own fault")

    queue.add(lease, commit, fail)
    queue.add(Lease("session", "owner", lease.epoch - 1, 30.0), commit, refusal.set_result)
    assert isinstance(await asyncio.wait_for(refusal, 5), LeaseLost)
    await store.close()
