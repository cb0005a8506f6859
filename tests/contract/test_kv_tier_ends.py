"""Closing a cold tier with waiting offers: they are written, and its threads end."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.state.kv_tier import KvTier
from tests.support.redis_fixture import RedisServer
from tests.support.table_worker import TableWorker
from tests.support.tier_rig import RUN_BYTES, space_of, wait_until


@pytest.mark.parametrize("num_waiting", [0, 1, 3])
def test_waiting_offers_are_written_when_a_tier_is_closed_and_its_threads_end(
    redis_server: RedisServer, num_waiting: int
) -> None:
    before = set(threading.enumerate())
    tier = KvTier(redis_server.url, space_of(TableWorker()))
    wait_until(lambda: tier.is_up)
    begun, go_on = threading.Event(), threading.Event()
    payload = np.zeros((16, RUN_BYTES // 16), dtype=np.uint8)

    def read() -> NDArray[np.uint8]:
        begun.set()
        assert go_on.wait(30)
        return payload

    for index in range(1 + num_waiting):
        tier.offer(f"{num_waiting} waiting, {index}".encode(), (), read)
        assert begun.wait(30)  # the others wait behind the first
    closing = threading.Thread(target=tier.close)
    closing.start()
    wait_until(closing.is_alive)
    go_on.set()
    closing.join()
    assert tier.tally.num_bytes["written"] == (1 + num_waiting) * RUN_BYTES
    assert set(threading.enumerate()) <= before  # a thread of an earlier test may have ended meanwhile
