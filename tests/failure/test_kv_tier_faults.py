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
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch

from draft_service.proposer import Proposer
from specdec.core.chain import ChainHasher
from specdec.engine.base import KvLayout, StepPlan
from specdec.errors import KvMiss, StaleEpoch
from specdec.state import kv_link, kv_reader, kv_writer
from specdec.state.kv_tier import KvTier
from specdec.types import SamplingFilters
from tests.support.redis_fixture import RedisServer
from tests.support.round_driver import RoundDriver
from tests.support.table_worker import TableWorker
from tests.support.tier_rig import Replica, space_of, wait_until
from tests.unit.state.test_kv_values import damaged

RUN_TOKENS = 256
NUM_RUNS = 3
PROMPT_TOKENS = NUM_RUNS * RUN_TOKENS + 10
RUN_BYTES = TableWorker().shape.kv_layout.block_bytes * RUN_TOKENS // 16
LOOKS_DOWN = "serving without the KV tier"


def prompt(number: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    """Prompts share no beginning."""
    return [3 + number % 20, 3 + number // 20, *(3 + index * 7 % 20 for index in range(num_tokens - 2))]


def worker(num_blocks: int = 128, **options: Any) -> TableWorker:
    return TableWorker(num_blocks=num_blocks, context=1024, **options)


def expected(tokens: list[int]) -> int:
    return TableWorker().greedy_continuation(tokens, 1)[0]


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


@asynccontextmanager
async def replica_of(a_worker: Any, url: str, **options: Any) -> AsyncIterator[Replica]:
    """One whose tier is up; closed, and found without anything left behind, at the end."""
    replica = Replica(a_worker, url, **options)
    try:
        await asyncio.to_thread(replica.wait_up)
        yield replica
    finally:
        await replica.close()


async def fill(url: str, *prompts: list[int]) -> None:
    """Lets a replica compute prompts and write what it has."""
    async with replica_of(worker(), url) as replica:
        for number, tokens in enumerate(prompts):
            await replica.ask(tokens, session_id=f"fill-{number}")
            num_bytes = (number + 1) * NUM_RUNS * RUN_BYTES
            await asyncio.to_thread(replica.wait_written, num_bytes)


async def asked(replica: Replica, tokens: list[int], **position: Any) -> int:
    """Asks for the next token, which must be the right one; returns how much of the KV was not computed."""
    verification = await asyncio.wait_for(replica.ask(tokens, **position), 30.0)
    assert int(verification.choice_token_ids[0]) == expected(tokens)
    return verification.num_cached_tokens


async def test_a_session_that_another_replica_computed_is_restored_and_goes_on(server: RedisServer) -> None:
    await fill(server.url, prompt(0))
    async with replica_of(worker(), server.url) as cold:
        tokens = prompt(0)
        assert await asked(cold, tokens) == NUM_RUNS * RUN_TOKENS
        assert sum(len(part.token_ids) for step in cold.worker.steps for part in step.slices) == 10
        for round_id in range(1, 4):
            tokens.append(expected(tokens))
            assert await asked(cold, tokens, round_id=round_id) == len(tokens) - 1


async def test_a_draft_and_a_target_restored_draw_and_decide_as_they_would_have(server: RedisServer) -> None:
    drivers = []
    for _ in range(2):
        async with (
            replica_of(worker(salt=1), server.url, kind=Proposer) as draft,
            replica_of(worker(), server.url) as target,
        ):
            driver = RoundDriver("s", prompt(0), draft.engine, target.engine, SamplingFilters(temperature=1.0), seed=7)
            drivers.append(driver)
            await driver.generate(40, 4)
            if len(drivers) == 1:
                await asyncio.to_thread(draft.wait_written, NUM_RUNS * RUN_BYTES)
                await asyncio.to_thread(target.wait_written, NUM_RUNS * RUN_BYTES)
    computed, restored = drivers
    assert restored.tokens == computed.tokens
    assert [one.num_accepted for one in restored.decisions] == [one.num_accepted for one in computed.decisions]
    assert any(decision.num_accepted for decision in restored.decisions)
    assert [driver.proposals[0].num_cached_tokens for driver in drivers] == [0, NUM_RUNS * RUN_TOKENS]


async def test_of_a_prompt_of_whole_runs_the_last_one_is_computed(server: RedisServer) -> None:
    """The logits of its last token are wanted."""
    await fill(server.url, prompt(0))
    async with replica_of(worker(), server.url) as cold:
        assert await asked(cold, prompt(0)[: NUM_RUNS * RUN_TOKENS]) == (NUM_RUNS - 1) * RUN_TOKENS


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
    for _ in range(5):
        async with replica_of(worker(), server.url) as cold:
            for number, tokens in enumerate(prompts):
                cached.append(await asked(cold, tokens, session_id=f"s{number}"))
            await cold.engine.release([f"s{number}" for number in range(40)])
    assert len(cached) == 200
    assert max(cached) <= RUN_TOKENS * NUM_RUNS
    assert cached.count(0) > 180


@pytest.mark.parametrize("missing", range(NUM_RUNS))
async def test_where_a_run_is_missing_the_rest_is_computed(missing: int, server: RedisServer) -> None:
    """Half by restore, half by replay."""
    await fill(server.url, prompt(0))
    async with replica_of(worker(), server.url) as cold:
        blocks = (missing + 1) * 16
        name = _names(prompt(0), blocks)[-1]
        with closing(redis.Redis.from_url(server.url)) as client:
            assert client.delete(cold.tier.space.key(name)) == 1
        assert await asked(cold, prompt(0)) == missing * RUN_TOKENS


async def test_what_a_session_still_holds_is_not_fetched_again(server: RedisServer) -> None:
    await fill(server.url, prompt(0))
    async with replica_of(worker(), server.url) as cold:
        assert await asked(cold, prompt(0)[:300], session_id="a") == RUN_TOKENS
        written = cold.worker.num_written
        assert await asked(cold, prompt(0), session_id="a", round_id=1) == NUM_RUNS * RUN_TOKENS
        # The blocks up to token 288 are full and published; the partial one after them is the session's own.
        assert cold.worker.num_written - written == NUM_RUNS * 16 - 300 // 16


@pytest.mark.parametrize(
    "change",
    [{"model_fingerprint": "another"}, {"kv_layout": "dtype"}, {"kv_layout": "rank"}, {"kv_layout": "layers"}],
    ids=["model", "dtype", "rank", "layers"],
)
async def test_blocks_of_another_model_dtype_or_rank_are_never_used(
    change: dict[str, str], server: RedisServer
) -> None:
    await fill(server.url, prompt(0))
    other = worker()
    num_bytes = other.shape.kv_layout.block_bytes
    layouts = {
        "dtype": KvLayout("float16", (num_bytes,)),
        "rank": KvLayout("slots", (num_bytes,), "tp2.0"),
        "layers": KvLayout("slots", (num_bytes // 2, num_bytes // 2)),
    }
    other.shape = replace(other.shape, **{name: layouts.get(value, value) for name, value in change.items()})
    # Whatever lies under its keys was written by somebody else.
    space = space_of(other)
    with closing(redis.Redis.from_url(server.url)) as client:
        for key, end in zip(_keys(client, prompt(0)), range(16, 64, 16), strict=True):
            client.set(space.key(_names(prompt(0), end)[-1]), client.get(key))
    async with replica_of(other, server.url) as replica:
        assert await asked(replica, prompt(0)) == 0


async def test_blocks_of_another_tenant_are_never_used(server: RedisServer) -> None:
    async with replica_of(worker(), server.url) as first:
        await asked(first, prompt(0), session_id="a", tenant="one")
        await asyncio.to_thread(first.wait_written, NUM_RUNS * RUN_BYTES)
    async with replica_of(worker(), server.url) as cold:
        assert await asked(cold, prompt(0), session_id="b", tenant="two") == 0
        assert await asked(cold, prompt(0), session_id="c") == 0
        assert await asked(cold, prompt(0), session_id="d", tenant="one") == NUM_RUNS * RUN_TOKENS


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
        assert cold.engine.info().kv_usage == 0.0
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

    tier.offer(b"first", read)
    assert await asyncio.to_thread(begun.wait, 30.0)
    for number in range(kv_writer.MAX_OFFERS + 7):
        tier.offer(b"%d" % number, read)
    assert tier.tally.dropped["queue_full"] == 7
    go_on.set()
    num_written = 1 + kv_writer.MAX_OFFERS
    await asyncio.to_thread(wait_until, lambda: tier.tally.num_bytes["written"] == num_written * RUN_BYTES)
    await asyncio.to_thread(tier.close)


async def test_a_run_that_is_there_is_neither_read_nor_written_again(server: RedisServer) -> None:
    await fill(server.url, prompt(0))
    async with replica_of(worker(), server.url, replay_s_per_token=0.0) as second:  # it computes
        assert await asked(second, prompt(0)) == 0
        assert await asked(second, prompt(1), session_id="t") == 0
        await asyncio.to_thread(second.wait_written, NUM_RUNS * RUN_BYTES)
        assert second.tier.tally.num_bytes["written"] == NUM_RUNS * RUN_BYTES
        assert second.worker.num_read == NUM_RUNS * 16


class SlowWorker(TableWorker):
    """Takes 2 ms a token."""

    def execute(self, plan: StepPlan) -> torch.Tensor:
        time.sleep(2e-3 * sum(len(part.token_ids) for part in plan.slices))
        return super().execute(plan)


async def test_the_faster_way_is_chosen_by_what_was_measured_on_the_replica_itself(server: RedisServer) -> None:
    await fill(server.url, prompt(0))
    async with replica_of(SlowWorker(num_blocks=128, context=1024), server.url, replay_s_per_token=None) as cold:
        await cold.engine.warm_up()
        assert await asked(cold, prompt(0)) == NUM_RUNS * RUN_TOKENS
        assert cold.tier.tally.choices["restore"] == 1
    async with replica_of(worker(), server.url, replay_s_per_token=None) as cold:
        await cold.engine.warm_up()
        for _ in range(3):
            cold.tier.rule.observe_transfer(RUN_BYTES, 100.0)  # a slow network
        assert await asked(cold, prompt(0)) == 0
        assert cold.tier.tally.choices["replay"] == 1


async def test_a_tier_that_was_measured_in_a_bad_moment_is_measured_again_when_that_made_somebody_compute(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_reader, "DOUBT_S", 0.0)
    await fill(server.url, prompt(0), prompt(1))
    async with replica_of(worker(), server.url, replay_s_per_token=0.1) as cold:
        for _ in range(5):
            cold.tier.rule.observe_transfer(RUN_BYTES, 100.0)
        assert await asked(cold, prompt(0), session_id="a") == 0
        await asyncio.to_thread(wait_until, lambda: cold.tier.rule.restore_s(NUM_RUNS * RUN_BYTES) < 1.0)
        assert await asked(cold, prompt(1), session_id="b") == NUM_RUNS * RUN_TOKENS


async def restoring(replica: Replica, number: int) -> None:
    """Returns once that many calls are held."""
    calls = replica.engine._engine_loop._calls
    await asyncio.to_thread(wait_until, lambda: len(calls.restoring) == number)


def _num_warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum(LOOKS_DOWN in record.message and record.levelno == logging.WARNING for record in caplog.records)


def _names(tokens: list[int], num_blocks: int) -> list[bytes]:
    hasher = ChainHasher(tokens)
    return [hasher.block_hash(index) for index in range(num_blocks)]


def _keys(client: Any, tokens: list[int]) -> list[str]:
    space = space_of(worker())
    keys = [space.key(_names(tokens, end)[-1]) for end in range(16, 64, 16)]
    assert all(client.exists(key) for key in keys)
    return keys


def _failing(write: Callable[..., None], *, after: int) -> Callable[..., None]:
    done: list[None] = []

    def write_or_fail(*arguments: Any) -> None:
        if len(done) == after:
            raise RuntimeError("no more")
        done.append(None)
        write(*arguments)

    return write_or_fail
