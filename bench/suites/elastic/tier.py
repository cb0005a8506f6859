"""Measure what the cold tier gains for a session that returns on a cold replica. Part of the suite `elastic`.

The demo pair as real processes. One system runs the sessions' first turn and writes their KV to the tier, a Redis of
its own; then it is gone. Two more, which never saw them, run the next turn of pairs of sessions with one text: one
system has the tier, the other computes everything again. Some sessions find half of their KV only. All must say the
same.
"""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import redis

from bench.harness.pairs import interleave, ratio_row
from bench.harness.report import progress
from bench.harness.rows import Row
from bench.harness.scrape import total
from bench.systems.models import DEMO
from bench.systems.simulated import ProcessSystem, ReplicaCommand, redis_server
from specdec.client import Client
from specdec.contract.types import BLOCK_TOKENS
from specdec.core.chain import ChainHasher
from specdec.engine.cold_tier import RUN_BLOCKS
from specdec.supervision.processes import free_ports

PROMPT_TOKENS = 1_500
NEW_TOKENS = (7, 8, 9, 10)
OUTPUT_TOKENS = 8
NUM_PAIRS, NUM_QUICK_PAIRS = 9, 2
NUM_WARM, NUM_HALVES = 2, 2
NUM_RUNS = PROMPT_TOKENS // (RUN_BLOCKS * BLOCK_TOKENS)
#: Vocabulary size of the demo pair's tokenizer.
_FIRST_ID, _VOCABULARY = 3, 2_048
_TIER = ("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru")
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class _Turn:
    """A session's second turn."""

    ttft_s: float
    token_ids: list[int]
    num_runs: float = 0
    """Number of runs of KV blocks that were restored for the turn."""


def measure_tier(_tokenizer_dir: Path, row: Callable[..., Row], quick: bool) -> list[Row]:
    """Return the time to the first token by restore and by replay.

    Args:
        row: makes a row of the suite.
        quick: fewer pairs of sessions.

    Raises:
        RuntimeError: a session said something else by restore, or not all of its KV was restored.
    """
    with redis_server() as store_url, redis_server(_TIER) as tier_url:
        # The first sessions warm up, the last ones have half of their KV.
        end = NUM_WARM + (NUM_QUICK_PAIRS if quick else NUM_PAIRS)
        measured, halves = range(NUM_WARM, end), range(end, end + NUM_HALVES)
        prompts = [_prompt(index) for index in range(halves.stop)]
        _run_first_turns(prompts, store_url, tier_url)
        for index in halves:
            _forget_second_half(prompts[index], tier_url)
        turns = _run_second_turns(len(prompts), store_url, tier_url)
    for index, (restored, replayed) in enumerate(zip(turns["restore"], turns["replay"], strict=True)):
        if restored.token_ids != replayed.token_ids:
            raise RuntimeError(f"session {index} says something else once its KV was restored")
        wanted = NUM_RUNS if index in measured else NUM_RUNS // 2
        if index >= NUM_WARM and restored.num_runs != wanted:
            raise RuntimeError(f"session {index}: {restored.num_runs:.0f} runs of KV were restored instead of {wanted}")
    ttft_s = {name: [done[index].ttft_s for index in measured] for name, done in turns.items()}
    rates = {name: [1 / each for each in seconds] for name, seconds in ttft_s.items()}
    row = partial(row, case=f"demo pair, a session of {PROMPT_TOKENS} tokens returns on a cold replica")
    return [
        ratio_row(row, rates, "restore", "replay", metric="ttft_speedup", required=2.0),
        *(
            row(system=name, metric="ttft_ms", value=float(np.median(seconds)) * 1e3, unit="ms")
            for name, seconds in ttft_s.items()
        ),
    ]


def _prompt(index: int) -> list[int]:
    return np.random.default_rng(index).integers(_FIRST_ID, _VOCABULARY, PROMPT_TOKENS).tolist()  # type: ignore[no-any-return]


def _replicas(tier_url: str, metrics: str = "") -> list[ReplicaCommand]:
    """A target and a draft, with a tier unless its URL is ""."""
    tier = ("--kv-tier-url", tier_url) if tier_url else ()
    return [
        ReplicaCommand.serving(
            role, DEMO / role, *tier, *(("--metrics", metrics) if metrics and role == "target" else ())
        )
        for role in ("target", "draft")
    ]


def _run_first_turns(prompts: list[list[int]], store_url: str, tier_url: str) -> None:
    """Two sessions of every prompt, one for each system to come; returns once all KV of the target is in the tier."""
    metrics = f"127.0.0.1:{free_ports(1)[0]}"
    with (
        ProcessSystem(DEMO / "target", _replicas(tier_url, metrics), redis_url=store_url) as system,
        Client(system.endpoint) as client,
        progress("first turns", len(prompts)) as advance,
    ):
        for index, prompt in enumerate(prompts):
            for name in ("restore", "replay"):
                _run_turn(client, f"{name}-{index}", prompt)
            num_bytes = (index + 1) * NUM_RUNS * _run_bytes()
            _wait_until(lambda num_bytes=num_bytes: _total(metrics, "bytes", direction="written") >= num_bytes)
            advance()


def _run_second_turns(num_sessions: int, store_url: str, tier_url: str) -> dict[str, list[_Turn]]:
    metrics = f"127.0.0.1:{free_ports(1)[0]}"
    with contextlib.ExitStack() as stack:
        clients = {}
        for name, replicas in (("restore", _replicas(tier_url, metrics)), ("replay", _replicas(""))):
            system = stack.enter_context(ProcessSystem(DEMO / "target", replicas, redis_url=store_url))
            clients[name] = stack.enter_context(Client(system.endpoint))
        advance = stack.enter_context(progress("second turns", 2 * num_sessions))

        def measure(index: int, name: str) -> _Turn:
            num_before = _total(metrics, "runs_restored")
            turn = _run_turn(clients[name], f"{name}-{index}", list(NEW_TOKENS))
            return replace(turn, num_runs=_total(metrics, "runs_restored") - num_before)

        return interleave(
            range(num_sessions), {name: partial(measure, name=name) for name in clients}, after_each=advance
        )


def _run_turn(client: Client, session_id: str, token_ids: list[int]) -> _Turn:
    began_s = time.perf_counter()
    stream = client.generate(
        prompt_token_ids=token_ids,
        session_id=session_id,
        stream=True,
        temperature=0.0,
        max_new_tokens=OUTPUT_TOKENS,
        ignore_eos=True,
    )
    with stream:
        next(stream)
        ttft_s = time.perf_counter() - began_s
        return _Turn(ttft_s, list(stream.result().token_ids))


def _forget_second_half(prompt: list[int], tier_url: str) -> None:
    """Remove the later runs of a prompt from the tier, both the draft's and the target's."""
    hasher = ChainHasher(prompt)
    with redis.Redis.from_url(tier_url) as tier:
        for run in range(NUM_RUNS // 2, NUM_RUNS):
            name = hasher.block_hash((run + 1) * RUN_BLOCKS - 1).hex()
            tier.delete(*tier.scan_iter(f"specdec-kv:*:{name}", count=10_000))


def _run_bytes() -> int:
    """Return the bytes of a run of the demo target, whose KV is in float32."""
    config = json.loads((DEMO / "target" / "config.json").read_text())
    row_numbers = config["num_key_value_heads"] * 2 * config["head_dim"]
    return int(RUN_BLOCKS * BLOCK_TOKENS * config["num_hidden_layers"] * row_numbers * 4)


def _total(metrics: str, name: str, **labels: str) -> float:
    return total(metrics, f"specdec:kv_tier_{name}_total", **labels)


def _wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            raise RuntimeError("the tier did not get the sessions' KV in time")
        time.sleep(0.01)
