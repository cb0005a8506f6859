"""Target engines on table workers that share a cold tier in a real Redis. Called by tests of the tier."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from specdec.contract.engine_api import EndedTurn
from specdec.contract.tenant import DEFAULT_TENANT
from specdec.contract.types import Verification, VerifyRequest
from specdec.core.chain import ChainHasher
from specdec.engine.cold_tier import run_blocks
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.state.kv_tier import KvTier
from specdec.state.kv_values import KvSpace
from target_service.verifier import Verifier
from tests.support.round_driver import make_round
from tests.support.table_worker import TableWorker

NO_DRAFT = np.empty(0, dtype=np.uint32)
RUN_TOKENS = 256
NUM_RUNS = 3
PROMPT_TOKENS = NUM_RUNS * RUN_TOKENS + 10
RUN_BYTES = TableWorker().shape.kv_layout.block_bytes * RUN_TOKENS // 16
_PATIENCE_S = 30.0


def space_of(worker: Any) -> KvSpace:
    """Return the tier that a service would make."""
    shape, layout = worker.shape, worker.shape.kv_layout
    blocks = run_blocks(layout.block_bytes)
    return KvSpace(shape.model_fingerprint, layout.dtype, layout.rank, layout.layer_bytes, blocks)


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.002)


class Replica:
    """A target or draft with a tier; the rule takes prefill for slow unless a test sets its cost."""

    def __init__(
        self, worker: Any, url: str, *, replay_s_per_token: float | None = 1.0, kind: type[Any] = Verifier
    ) -> None:
        """`replay_s_per_token`: assumed cost of prefill; None: the measured one."""
        self.worker = worker
        self.tier = KvTier(url, space_of(worker))
        self.engine = kind(worker, ReplicaOptions(kv_tier=self.tier))
        self.num_turns = 0
        """Turns of the device thread's loop."""
        inbox = self.engine._engine_loop._inbox
        inbox.run_commands = partial(self._run_commands, inbox.run_commands)
        if replay_s_per_token is not None:
            self.engine._engine_loop._scheduler.predict_replay_s = lambda num_tokens, kv_len: (
                num_tokens * replay_s_per_token
            )

    async def ask(self, tokens: Sequence[int], *, tenant: str = DEFAULT_TENANT, **position: Any) -> Verification:
        asked = replace(make_round(tokens, **position), tenant=tenant)
        return await self.engine.verify(VerifyRequest(asked, NO_DRAFT, ()))

    def wait_up(self) -> None:
        wait_until(lambda: self.tier.is_up)

    def wait_written(self, num_bytes: int) -> None:
        """Wait until `num_bytes` were written in all."""
        wait_until(lambda: self.tier.tally.num_bytes["written"] >= num_bytes)

    def _run_commands(self, run_commands: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.num_turns += 1
        return run_commands(*arguments, **options)

    async def close(self) -> None:
        """Close the replica, and check that no block is pinned."""
        self.engine.check_integrity()
        assert not self.engine._engine_loop._calls.restoring
        await self.engine.close()
        self.engine.check_integrity()
        assert self.engine.stats().num_held_kv_blocks == 0
        await asyncio.to_thread(self.tier.close)


def prompt(number: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    """Return prompts without a common prefix."""
    return [3 + number % 20, 3 + number // 20, *(3 + index * 7 % 20 for index in range(num_tokens - 2))]


def worker(num_blocks: int = 128, **options: Any) -> TableWorker:
    return TableWorker(num_blocks=num_blocks, context=1024, **options)


def expected(tokens: list[int]) -> int:
    return TableWorker().greedy_continuation(tokens, 1)[0]


@asynccontextmanager
async def replica_of(a_worker: Any, url: str, **options: Any) -> AsyncIterator[Replica]:
    """Yield a replica whose tier is up; close it at the end and check that it left nothing."""
    replica = Replica(a_worker, url, **options)
    try:
        await asyncio.to_thread(replica.wait_up)
        yield replica
    finally:
        await replica.close()


async def fill(url: str, *prompts: list[int]) -> None:
    """Let a replica compute prompts and write their KV."""
    async with replica_of(worker(), url) as replica:
        for number, tokens in enumerate(prompts):
            await replica.ask(tokens, session_id=f"fill-{number}")
            num_bytes = (number + 1) * NUM_RUNS * RUN_BYTES
            await asyncio.to_thread(replica.wait_written, num_bytes)


async def asked(replica: Replica, tokens: list[int], **position: Any) -> int:
    """Request the next token in a turn of its own, check it, and return the number of tokens without a computation."""
    verification = await asyncio.wait_for(replica.ask(tokens, **position), 30.0)
    assert int(verification.choice_token_ids[0]) == expected(tokens)
    await replica.engine.end_turns([EndedTurn(position.get("session_id", "s"), position.get("epoch", 1))])
    return verification.num_cached_tokens


async def restoring(replica: Replica, number: int) -> None:
    """Return once that many calls are blocked."""
    calls = replica.engine._engine_loop._calls
    await asyncio.to_thread(wait_until, lambda: len(calls.restoring) == number)


def block_names(tokens: list[int], num_blocks: int) -> list[bytes]:
    hasher = ChainHasher(tokens)
    return [hasher.block_hash(index) for index in range(num_blocks)]


def keys_of(client: Any, tokens: list[int]) -> list[str]:
    space = space_of(worker())
    keys = [space.key(block_names(tokens, end)[-1]) for end in range(16, 64, 16)]
    assert all(client.exists(key) for key in keys)
    return keys
