"""Measures the processor time that Redis itself spends on a commit and on a read of the registry.

The store's own scripts run on a redis-server, whose statistics tell the time of a call without messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import redis.asyncio

from specdec.contract.engine_api import EngineInfo
from specdec.state.own_redis import throwaway_redis
from specdec.state.redis_store import RedisReplicaRegistry, RedisSessionStore
from specdec.state.store import Commit, Lease, ReplicaRecord, RequestRecord

NUM_REPLICAS = 50
_NUM_SESSIONS, _NUM_ROUNDS, _NUM_READS = 50, 40, 100
_TOKENS_PER_ROUND = 4
_TTL_S = 600.0
_REPLICA = EngineInfo(
    version="0.1.0", role="target", pool="default", replica_id="target-0", model="meta-llama/Llama-3.1-8B-Instruct",
    model_fingerprint="0" * 32, vocabulary_fingerprint="0" * 32, vocabulary_size=128_256, max_context_tokens=131_072,
    eos_token_ids=(128_001, 128_008, 128_009), max_gamma=8, num_kv_blocks=25_000, kv_block_tokens=16, kv_usage=0.2,
    num_sessions=40, draining=False, dtype="bfloat16", device="cuda", incarnation="0" * 32, num_running=30,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RedisCosts:
    """Processor time of the server."""

    commit_s: float
    read_s_per_replica: float


def measure_redis() -> RedisCosts:
    """Return the costs on this machine."""
    with throwaway_redis() as server:
        return asyncio.run(_measure(server.url))


async def _measure(url: str) -> RedisCosts:
    store, registry = RedisSessionStore(url), RedisReplicaRegistry(url)
    statistics = redis.asyncio.Redis.from_url(url)
    try:
        leases = [await _begun(store, f"session-{index}") for index in range(_NUM_SESSIONS)]
        commit_s = await _per_call(statistics, _commit_rounds(store, leases))
        for index in range(NUM_REPLICAS):
            info = replace(_REPLICA, replica_id=f"target-{index}")
            await registry.publish(ReplicaRecord(f"10.0.0.{index}:50071", info), ttl_s=_TTL_S)
        read_s = await _per_call(statistics, _read(registry))
    finally:
        await asyncio.gather(statistics.aclose(), store.close(), registry.close())
    return RedisCosts(commit_s, read_s / NUM_REPLICAS)


async def _begun(store: RedisSessionStore, session_id: str) -> Lease:
    lease = await store.acquire(session_id, owner="coordinator", ttl_s=_TTL_S, create=True)
    request = RequestRecord("request", "digest", "{}", turn=0, output_start=0)
    await store.begin_request(lease, request, keep=0, token_ids=np.zeros(0, dtype=np.uint32))
    return lease


async def _commit_rounds(store: RedisSessionStore, leases: Sequence[Lease]) -> None:
    tokens = np.arange(_TOKENS_PER_ROUND, dtype=np.uint32)
    for index in range(_NUM_ROUNDS):
        commit = Commit(index, index * _TOKENS_PER_ROUND, tokens, "{}", None, bytes(16))
        for error in await store.commit_all([(lease, commit) for lease in leases]):
            if error is not None:
                raise error


async def _read(registry: RedisReplicaRegistry) -> None:
    for _ in range(_NUM_READS):
        await registry.replicas("target")


async def _per_call(statistics: Any, calls: Awaitable[None]) -> float:
    """Return the server's seconds of a script."""
    await statistics.config_resetstat()
    await calls
    commands = await statistics.info("commandstats")
    return float(commands["cmdstat_evalsha"]["usec_per_call"]) * 1e-6
