"""The cold tier of a divided model: each rank keeps and fetches its own part; a run is used if all ranks have it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from specdec.engine.loader import load_worker
from specdec.engine.options import LoadRequest
from tests.support.rank_rig import RankRig
from tests.support.redis_fixture import RedisServer
from tests.support.tier_rig import RUN_TOKENS, Replica, block_names, space_of, wait_until
from tests.support.tiny_models import build_tiny_model

NUM_RUNS = 3
PROMPT = [2 + index * 37 % 250 for index in range(NUM_RUNS * RUN_TOKENS + 40)]
NUM_ROUNDS = 6


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    arguments = ("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru")
    server = RedisServer(tmp_path_factory.mktemp("tier"), arguments=arguments)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def rig() -> Iterator[RankRig]:
    with RankRig(2) as rig:
        yield rig


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Our own sharded stack, and transformers' tensor parallel."""
    folder = tmp_path_factory.mktemp("models")
    return {name: build_tiny_model(name, folder / name, context=1024) for name in ("llama", "gemma3")}


@pytest.fixture
def keys(tier: RedisServer) -> Iterator[Callable[[str], list[bytes]]]:
    """Return the keys of a rank's values in a store that is empty at first."""
    with redis.Redis.from_url(tier.url) as client:
        client.flushall()
        yield lambda rank: sorted(client.keys(f"specdec-kv:*:{rank}:*"))


async def speak(worker: Any, url: str, *, num_kept: int | None = None) -> tuple[list[int], int]:
    """Greedy rounds of a session that is new there: the text, and how much of the prompt's KV was not computed.

    `num_kept`: number of runs to wait for until this rank has written them; then another session follows.
    """
    replica = Replica(worker, url)
    try:
        await asyncio.to_thread(replica.wait_up)
        tokens, cached = list(PROMPT), 0
        for round_id in range(NUM_ROUNDS):
            verification = await replica.ask(tokens, round_id=round_id)
            cached = cached if round_id else verification.num_cached_tokens
            tokens.append(int(verification.choice_token_ids[0]))
        if num_kept is not None:
            layout = worker.shape.kv_layout
            num_bytes = num_kept * RUN_TOKENS // 16 * layout.block_bytes
            await asyncio.to_thread(replica.wait_written, num_bytes)
        return tokens[len(PROMPT) :], cached
    finally:
        await replica.close()


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "gemma3"])
async def test_every_ranks_part_is_kept_and_restored_by_a_new_group(
    name: str, models: dict[str, Path], rig: RankRig, tier: RedisServer, keys: Callable[[str], list[bytes]]
) -> None:
    expected, cached = await speak(rig.load(models[name], kv_tier_url=tier.url), tier.url, num_kept=NUM_RUNS)
    assert cached == 0
    await asyncio.to_thread(wait_until, lambda: len(keys("tp2.1")) == NUM_RUNS)
    assert len(keys("tp2.0")) == NUM_RUNS

    cold = rig.load(models[name], kv_tier_url=tier.url)
    assert await speak(cold, tier.url) == (expected, NUM_RUNS * RUN_TOKENS)

    # The other rank's part of the second run is missing, so that run and those after it are computed.
    second = space_of(cold).key(block_names(PROMPT, 32)[-1]).replace("tp2.0", "tp2.1")
    with redis.Redis.from_url(tier.url) as client:
        kept = client.getdel(second)
        cold = rig.load(models[name], kv_tier_url=tier.url)
        assert await speak(cold, tier.url) == (expected, RUN_TOKENS)
        # It has been written again. Then it is not what it was.
        await asyncio.to_thread(wait_until, lambda: client.exists(second))
        client.set(second, kept[:-1] + bytes([kept[-1] ^ 1]))
        cold = rig.load(models[name], kv_tier_url=tier.url)
        assert await speak(cold, tier.url) == (expected, RUN_TOKENS)


async def test_parts_and_whole_blocks_are_never_exchanged(
    models: dict[str, Path], rig: RankRig, tier: RedisServer, keys: Callable[[str], list[bytes]]
) -> None:
    expected, _ = await speak(rig.load(models["llama"], kv_tier_url=tier.url), tier.url, num_kept=NUM_RUNS)
    await asyncio.to_thread(wait_until, lambda: len(keys("tp2.1")) == NUM_RUNS)
    alone = load_worker(LoadRequest(str(models["llama"]), device="cpu", dtype="float32", num_kv_blocks=80))
    assert await speak(alone, tier.url, num_kept=NUM_RUNS) == (expected, 0)
    assert len(keys("tp1.0")) == NUM_RUNS
