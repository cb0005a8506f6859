"""What a cold replica takes from the tier, what it never takes, and when it had rather compute.

The engines are real, on table workers, whose next token depends on every slot of the session's KV: one wrong block and
the token is another, or the worker refuses.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import redis
import torch

from draft_service.proposer import Proposer
from specdec.contract.types import SamplingFilters
from specdec.engine.base import KvLayout, StepPlan
from specdec.state import kv_reader
from tests.support.redis_fixture import RedisServer
from tests.support.round_driver import RoundDriver
from tests.support.table_worker import TableWorker
from tests.support.tier_rig import (
    NUM_RUNS,
    RUN_BYTES,
    RUN_TOKENS,
    asked,
    block_names,
    expected,
    fill,
    keys_of,
    prompt,
    replica_of,
    space_of,
    wait_until,
    worker,
)

LOOKS_DOWN = "not available, serving without it"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """One of the test's own."""
    server = RedisServer(tmp_path, arguments=("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"))
    server.start()
    yield server
    server.signal(signal.SIGCONT)
    server.stop()


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


@pytest.mark.parametrize("missing", range(NUM_RUNS))
async def test_where_a_run_is_missing_the_rest_is_computed(missing: int, server: RedisServer) -> None:
    """Half by restore, half by replay."""
    await fill(server.url, prompt(0))
    async with replica_of(worker(), server.url) as cold:
        blocks = (missing + 1) * 16
        name = block_names(prompt(0), blocks)[-1]
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
        for key, end in zip(keys_of(client, prompt(0)), range(16, 64, 16), strict=True):
            client.set(space.key(block_names(prompt(0), end)[-1]), client.get(key))
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
