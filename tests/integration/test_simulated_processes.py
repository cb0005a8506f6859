"""Simulated replicas as real processes behind a real coordinator, called from a separate client process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import redis

from bench.harness.streams import StreamProcess, StreamRequest
from bench.systems.simulated import ProcessSystem, redis_server, simulated_replicas, write_tokenizer

NUM_TOKENS = 120
GAMMA = 4


def request(seed: int, **options: object) -> StreamRequest:
    fixed = {"max_new_tokens": NUM_TOKENS, "seed": seed, "gamma": GAMMA, "ignore_eos": True, "temperature": 1.0}
    return StreamRequest([seed + 1, 2, 3], fixed | options)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_streams_of_sampled_and_greedy_rounds_finish_and_accept_as_configured(tokenizer_dir: Path) -> None:
    with (
        ProcessSystem(tokenizer_dir, simulated_replicas("simulated:8b-0.6b,alpha=0.9", num_drafts=2)) as system,
        StreamProcess(system.endpoint) as client,
    ):
        cpu_before_s, began = system.coordinator_cpu_s, time.monotonic()
        runs = client.run([request(seed, temperature=float(seed % 2)) for seed in range(8)])
        cpu_s, wall_s = system.coordinator_cpu_s - cpu_before_s, time.monotonic() - began
    assert [run.num_tokens for run in runs] == [NUM_TOKENS] * 8
    num_rounds = sum(run.stats["num_rounds"] for run in runs)
    # E is 4.1 at alpha 0.9; 8 streams of about 30 rounds each have a standard error of 0.1, seeds are fixed.
    assert sum(run.num_tokens for run in runs) / num_rounds == pytest.approx(4.1, abs=0.4)
    assert all(run.stats["num_target_only_steps"] <= 1 for run in runs)
    assert all(1 < len(run.chunk_s) <= run.stats["num_rounds"] for run in runs)  # a late chunk brings several rounds
    # About 240 rounds take the coordinator well over 0.1 ms each, on its one event loop.
    assert 1e-4 * num_rounds < cpu_s < wall_s * (os.cpu_count() or 1)


def test_coordinators_of_a_tenant_share_the_locations_of_prefixes_through_redis(tokenizer_dir: Path) -> None:
    prefix = [1 + 7 * index % 1_000 for index in range(1_000)]
    with (
        redis_server() as redis_url,
        ProcessSystem(
            tokenizer_dir,
            simulated_replicas("simulated:8b-0.6b,predraft=off", num_drafts=2, num_targets=3),
            redis_url=redis_url,
            num_coordinators=2,
            coordinator_arguments=("--tenant", "acme"),
        ) as system,
        StreamProcess(system.endpoints[0]) as one,
        StreamProcess(system.endpoints[1]) as other,
    ):
        runs = []
        for index in range(8):
            asked = StreamRequest([*prefix, 2_000 + index], {"max_new_tokens": 8, "ignore_eos": True})
            runs += (one, other)[index % 2].run([asked])
        with redis.Redis.from_url(redis_url) as client:
            keys = client.keys("specdec:*")
    # Placement by load alone would have all three targets prefill the prefix, 992 tokens of which are whole blocks.
    assert [run.num_cached_prompt_tokens for run in runs] == [0, *[992] * 7]
    left = {key.partition(b"{")[0] for key in keys if not key.endswith(b":deleted")}  # keys that the clients left
    assert left == {b"specdec:acme:prefix:", b"specdec:usage:", b"specdec:usage:kept"}


@pytest.mark.parametrize(("num_clients", "num_tokens"), [(64, 128), (200, 64)])
@pytest.mark.full
def test_an_idle_system_takes_a_batch_of_clients_and_refuses_none(
    tokenizer_dir: Path, num_clients: int, num_tokens: int
) -> None:
    with (
        ProcessSystem(tokenizer_dir, simulated_replicas("simulated:70b-1b", num_drafts=2)) as system,
        StreamProcess(system.endpoint) as client,
    ):
        client.run([request(1, max_new_tokens=8)])  # its speed is known
        runs = client.run([request(seed, max_new_tokens=num_tokens) for seed in range(num_clients)])
    assert [run.num_tokens for run in runs] == [num_tokens] * num_clients
