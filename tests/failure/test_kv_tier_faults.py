"""A cold tier that is slow, gone, full, forgetful or lying changes nothing but speed, and leaves nothing behind.

The engines are real, on table workers, whose next token depends on every slot of the session's KV: one wrong block and
the token is another, or the worker refuses.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from specdec.contract.errors import KvMiss, StaleEpoch
from specdec.state import kv_link, kv_reader, kv_tier
from specdec.state.kv_tier import KvTier
from tests.support.redis_fixture import RedisServer
from tests.support.table_worker import TableWorker
from tests.support.tier_rig import (
    NUM_RUNS,
    RUN_BYTES,
    RUN_TOKENS,
    Replica,
    asked,
    expected,
    fill,
    prompt,
    replica_of,
    restoring,
    space_of,
    wait_until,
    worker,
)
from tests.unit.state.test_kv_values import damaged

LOOKS_DOWN = "not available, serving without it"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """One of the test's own."""
    server = RedisServer(tmp_path, arguments=("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"))
    server.start()
    yield server
    server.signal(signal.SIGCONT)
    server.stop()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetches are waited for."""
    monkeypatch.setattr(kv_reader, "PATIENCE_S", 60.0)
    monkeypatch.setattr(kv_link, "SOCKET_TIMEOUT_S", 60.0)


async def test_damaged_values_are_computed_again(server: RedisServer) -> None:
    prompts = [prompt(number) for number in range(40)]
    await fill(server.url, *prompts)
    random_ = random.Random(2)
    with closing(redis.Redis.from_url(server.url)) as client:
        keys = [key for key in client.scan_iter("specdec-kv:*") if b"probe" not in key]
        assert len(keys) == 40 * NUM_RUNS
        values = {key: client.get(key) for key in keys}
        for key in keys:
            value = values[key]
            if random_.random() < 0.1:
                client.set(key, values[random_.choice(keys)])  # another run's
            else:
                client.set(key, damaged(value, random_))
    cached = []
    for _ in range(2):
        async with replica_of(worker(), server.url) as cold:
            for number, tokens in enumerate(prompts):
                cached.append(await asked(cold, tokens, session_id=f"s{number}"))
            await cold.engine.release([f"s{number}" for number in range(40)])
    assert len(cached) == 80
    assert max(cached) <= RUN_TOKENS * NUM_RUNS
    assert cached.count(0) > 72


async def test_a_tier_that_forgets_most_of_it_changes_no_token(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, arguments=("--maxmemory", "1600kb", "--maxmemory-policy", "allkeys-lru"))
    server.start()
    prompts = [prompt(number) for number in range(60)]
    async with replica_of(worker(), server.url) as first:
        for number, tokens in enumerate(prompts):
            await asked(first, tokens, session_id=f"s{number}")
    with closing(redis.Redis.from_url(server.url)) as client:
        assert client.info("stats")["evicted_keys"] > 0
    async with replica_of(worker(), server.url) as cold:
        cached = [await asked(cold, tokens, session_id=f"s{number}") for number, tokens in enumerate(prompts)]
    assert 0 < sum(cached) < 60 * NUM_RUNS * RUN_TOKENS
    server.stop()


async def test_a_tier_that_refuses_to_write_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = RedisServer(tmp_path, arguments=("--maxmemory", "1mb", "--maxmemory-policy", "noeviction"))
    server.start()
    async with replica_of(worker(), server.url) as replica:
        for number in range(6):
            await asked(replica, prompt(number), session_id=f"s{number}")
        await asyncio.to_thread(wait_until, lambda: replica.tier.tally.dropped["refused"] > 1)
    assert [record.levelname for record in caplog.records if LOOKS_DOWN in record.message] == ["WARNING"]
    assert any("grows without bound" in record.message for record in caplog.records)
    server.stop()


async def test_a_url_that_nobody_answers_is_one_warning_and_no_call_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_link, "FIRST_RETRY_S", 0.01)
    replica = Replica(worker(), f"unix://{tmp_path}/nobody.sock")
    await asyncio.to_thread(wait_until, lambda: _num_warnings(caplog) == 1)
    for number in range(3):
        assert await asked(replica, prompt(number), session_id=f"s{number}") == 0
    await asyncio.to_thread(time.sleep, 0.1)  # several tries more
    assert _num_warnings(caplog) == 1
    assert replica.tier.tally.choices["unavailable"] == 3
    await replica.close()


async def test_a_tier_that_hangs_is_left_for_prefill_and_used_again_once_it_answers(
    server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_link, "FIRST_RETRY_S", 0.05)
    await fill(server.url, prompt(0), prompt(1))
    async with replica_of(worker(), server.url) as cold:
        server.signal(signal.SIGSTOP)
        assert await asked(cold, prompt(0), session_id="a") == 0
        assert cold.tier.tally.choices["late"] == 1
        await asyncio.to_thread(wait_until, lambda: not cold.tier.is_up)
        assert await asked(cold, prompt(2), session_id="b") == 0
        assert cold.tier.tally.choices["unavailable"] == 1
        assert _num_warnings(caplog) == 1
        server.signal(signal.SIGCONT)
        await asyncio.to_thread(wait_until, lambda: cold.tier.is_up)
        assert await asked(cold, prompt(1), session_id="c") == NUM_RUNS * RUN_TOKENS
    assert any("answers again" in record.message for record in caplog.records)


async def test_a_tier_that_dies_while_a_session_is_restored_leaves_it_to_prefill(
    server: RedisServer, patient: None, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(server.url, prompt(0))
    async with replica_of(worker(), server.url) as cold:
        server.signal(signal.SIGSTOP)
        waiting = asyncio.create_task(asked(cold, prompt(0)))
        await restoring(cold, 1)
        server.signal(signal.SIGKILL)
        assert await waiting == 0
        assert _num_warnings(caplog) == 1


async def test_other_sessions_run_while_one_is_restored(server: RedisServer, patient: None) -> None:
    await fill(server.url, prompt(0))
    async with replica_of(worker(), server.url) as cold:
        server.signal(signal.SIGSTOP)
        waiting = asyncio.create_task(asked(cold, prompt(0), session_id="a"))
        await restoring(cold, 1)
        tokens = prompt(1, 20)
        for round_id in range(5):
            await asked(cold, tokens, session_id="b", round_id=round_id)
            tokens.append(expected(tokens))
        assert not waiting.done()
        server.signal(signal.SIGCONT)
        assert await waiting == NUM_RUNS * RUN_TOKENS


async def test_calls_that_are_superseded_cancelled_or_released_while_restored_leave_nothing(
    server: RedisServer, patient: None
) -> None:
    await fill(server.url, prompt(0), prompt(1), prompt(2))
    async with replica_of(worker(num_blocks=200), server.url) as cold:
        server.signal(signal.SIGSTOP)
        tasks = [
            asyncio.create_task(asked(cold, prompt(number), session_id=f"s{number}", round_id=1)) for number in range(3)
        ]
        await restoring(cold, 3)
        tasks[0].cancel()
        # Another text, into whose blocks nothing of the first may come.
        newer = asyncio.create_task(asked(cold, prompt(3), session_id="s1", epoch=2))
        with pytest.raises(StaleEpoch):
            await tasks[1]
        await cold.engine.release(["s2"])
        with pytest.raises(KvMiss):
            await tasks[2]
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        await restoring(cold, 1)
        cold.engine.check_integrity()
        server.signal(signal.SIGCONT)
        assert await newer == 0
        assert cold.engine.info().num_sessions == 1
        await cold.engine.release(["s1"])
        assert cold.engine.stats().num_held_kv_blocks == 0
        assert await asked(cold, prompt(2), session_id="s2", round_id=2) == NUM_RUNS * RUN_TOKENS


async def test_a_call_that_lacks_blocks_waits_for_those_of_a_session_that_is_restored(
    server: RedisServer, patient: None
) -> None:
    await fill(server.url, prompt(0))
    async with replica_of(worker(num_blocks=64), server.url) as cold:
        server.signal(signal.SIGSTOP)
        first = asyncio.create_task(asked(cold, prompt(0), session_id="a"))
        await restoring(cold, 1)
        second = asyncio.create_task(asked(cold, prompt(1), session_id="b"))
        await asyncio.sleep(0.05)
        num_turns = cold.num_turns
        await asyncio.sleep(0.2)
        assert cold.num_turns - num_turns < 5, "it waits by spinning"
        assert not second.done()
        server.signal(signal.SIGCONT)
        assert await first == NUM_RUNS * RUN_TOKENS
        assert await second == 0


async def test_a_replica_that_drains_finishes_what_it_restores(server: RedisServer, patient: None) -> None:
    await fill(server.url, prompt(0))
    async with replica_of(worker(), server.url) as cold:
        server.signal(signal.SIGSTOP)
        waiting = asyncio.create_task(asked(cold, prompt(0)))
        await restoring(cold, 1)
        draining = asyncio.create_task(cold.engine.close())
        server.signal(signal.SIGCONT)
        assert await waiting == NUM_RUNS * RUN_TOKENS
        await draining


async def test_blocks_that_cannot_be_copied_in_are_computed(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(server.url, prompt(0))
    cold_worker = worker()
    cold_worker.write_blocks = _failing(cold_worker.write_blocks, after=1)
    async with replica_of(cold_worker, server.url) as cold:
        assert await asked(cold, prompt(0)) == RUN_TOKENS


class TornReads(TableWorker):
    """Copies blocks out so slowly that they are evicted and written again meanwhile."""

    def read_blocks(self, block_ids: Any) -> np.ndarray:
        rows = []
        for block_id in block_ids:
            rows.append(super().read_blocks([block_id]))
            time.sleep(0.001)
        return np.concatenate(rows)


async def test_blocks_that_are_evicted_while_they_are_read_are_not_written(server: RedisServer) -> None:
    prompts = [prompt(number, 300) for number in range(60)]
    async with replica_of(TornReads(num_blocks=40, context=1024), server.url) as small:
        for number, tokens in enumerate(prompts):
            await asked(small, tokens, session_id=f"s{number}")
        await asyncio.to_thread(wait_until, lambda: small.tier.tally.dropped["evicted"] > 0)
        written = small.tier.tally
    assert written.num_bytes["written"] + written.dropped["evicted"] > 0
    async with replica_of(worker(), server.url) as cold:
        cached = [await asked(cold, tokens, session_id=f"s{number}") for number, tokens in enumerate(prompts)]
    assert RUN_TOKENS in cached


async def test_an_offer_is_dropped_where_the_queue_is_full_and_never_waits(server: RedisServer) -> None:
    tier = KvTier(server.url, space_of(worker()))
    await asyncio.to_thread(wait_until, lambda: tier.is_up)
    begun, go_on = threading.Event(), threading.Event()
    payload = np.zeros((16, RUN_BYTES // 16), dtype=np.uint8)

    def read() -> np.ndarray:
        begun.set()
        assert go_on.wait(30.0)
        return payload

    tier.offer(b"first", (), read)
    assert await asyncio.to_thread(begun.wait, 30.0)
    for number in range(kv_tier.MAX_OFFERS + 7):
        tier.offer(b"%d" % number, (), read)
    assert tier.tally.dropped["queue_full"] == 7
    go_on.set()
    num_written = 1 + kv_tier.MAX_OFFERS
    await asyncio.to_thread(wait_until, lambda: tier.tally.num_bytes["written"] == num_written * RUN_BYTES)
    await asyncio.to_thread(tier.close)


def _num_warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum(LOOKS_DOWN in record.message and record.levelno == logging.WARNING for record in caplog.records)


def _failing(write: Callable[..., None], *, after: int) -> Callable[..., None]:
    done: list[None] = []

    def write_or_fail(*arguments: Any) -> None:
        if len(done) == after:
            raise RuntimeError("no more")
        done.append(None)
        write(*arguments)

    return write_or_fail
