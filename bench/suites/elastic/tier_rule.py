"""Measure what the cold tier's rule chooses for targets of other speeds than the demo pair's.

The real engine, scheduler and tier run with a real Redis on a worker that computes nothing: its steps are waits of a
chosen length, and its KV has the size of an 8B model's in 16 bits (32 layers of 8 heads of 128). Called by
`tier`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bench.harness.rows import Row
from bench.systems.simulated import redis_server
from specdec.contract.types import BLOCK_TOKENS, DrawRule, SamplingFilters, SessionPosition, VerifyRequest
from specdec.engine.base import KvLayout, ModelShape, StepPlan, Worker
from specdec.engine.cold_tier import run_blocks
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.engine.simulated.device import ModelledTime
from specdec.state.kv_tier import KvTier
from specdec.state.kv_values import KvSpace
from target_service.verifier import Verifier

PROMPT_TOKENS = 1_500
_NUM_LAYERS, _LAYER_BYTES = 32, BLOCK_TOKENS * 2 * 8 * 128 * 2
_NUM_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS + 2
#: Simulated targets by their prefill tokens a second: with a GPU, and without one.
TARGETS = {"fast target": ModelledTime(5e-3, 1 / 30_000), "slow target": ModelledTime(5e-3, 1 / 300)}
_TIER = ("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru")
_PATIENCE_S = 60.0


class _TimedWorker(Worker):
    """Implements `specdec.engine.base.Worker` without a model."""

    def __init__(self, forward: ModelledTime) -> None:
        layout = KvLayout("bfloat16", (_LAYER_BYTES,) * _NUM_LAYERS)
        self.shape = ModelShape(
            vocabulary_size=32,
            max_context_tokens=_NUM_BLOCKS * BLOCK_TOKENS,
            eos_token_ids=(),
            model_fingerprint="timed",
            vocabulary_fingerprint="timed",
            num_kv_blocks=_NUM_BLOCKS,
            dtype="bfloat16",
            device="cpu",
            kv_layout=layout,
        )
        self._forward = forward
        self._blocks = np.zeros((_NUM_BLOCKS, layout.block_bytes), dtype=np.uint8)

    def execute(self, plan: StepPlan) -> torch.Tensor:
        time.sleep(self._forward.step_s(sum(len(part.token_ids) for part in plan.slices)))
        return torch.zeros(sum(part.num_logit_rows for part in plan.slices), self.shape.vocabulary_size)

    def read_blocks(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        return self._blocks[list(block_ids)]

    def write_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        self._blocks[list(block_ids)] = rows


@dataclass(frozen=True)
class _Choice:
    """Choice of the rule for a session that returned on a cold replica."""

    is_restored: bool
    restore_s: float
    """Predicted seconds."""
    replay_s: float
    """Predicted seconds."""


def measure_rule(row: Callable[..., Row]) -> list[Row]:
    """Return the choice for each simulated target, with the two predictions behind it."""
    rows = []
    for name, forward in TARGETS.items():
        with redis_server(_TIER) as url:
            choice = asyncio.run(_choose(forward, url))
        case = f"simulated 8B target, prefill at {1 / forward.per_token_s:,.0f} tokens/s, {PROMPT_TOKENS} tokens return"
        wanted = "replay" if name == "fast target" else "restore"
        is_wanted = choice.is_restored == (wanted == "restore")
        note = f"1: the rule chose {wanted} by itself"
        made = {"case": case, "system": name, "simulated": True}
        rows += [
            row(**made, metric=f"chooses_{wanted}", value=float(is_wanted), unit="", required=1.0, note=note),
            row(**made, metric="predicted_restore_ms", value=choice.restore_s * 1e3, unit="ms"),
            row(**made, metric="predicted_replay_ms", value=choice.replay_s * 1e3, unit="ms"),
        ]
    return rows


async def _choose(forward: ModelledTime, url: str) -> _Choice:
    """Lets one replica compute and write a session, and it return on another."""
    for index in range(2):
        worker = _TimedWorker(forward)
        layout = worker.shape.kv_layout
        assert layout is not None
        num_blocks = run_blocks(layout.block_bytes)
        space = KvSpace("timed", layout.dtype, layout.rank, layout.layer_bytes, num_blocks)
        tier = KvTier(url, space)
        verifier = Verifier(worker, ReplicaOptions(kv_tier=tier))
        await verifier.warm_up()
        await _until(lambda tier=tier: tier.is_up)
        answer = await verifier.verify(VerifyRequest(_position(), np.empty(0, dtype=np.uint32), ()))
        num_runs = (PROMPT_TOKENS - 1) // (num_blocks * BLOCK_TOKENS)
        if index == 0:
            num_bytes = num_runs * space.payload_bytes
            await _until(lambda tier=tier, num_bytes=num_bytes: tier.tally.num_bytes["written"] >= num_bytes)
        await verifier.close()
        await asyncio.to_thread(tier.close)
    return _Choice(
        is_restored=answer.num_cached_tokens > 0,
        restore_s=tier.rule.restore_s(num_runs * space.payload_bytes),
        replay_s=num_runs * tier.tally.replay_s_per_run,
    )


def _position() -> SessionPosition:
    return SessionPosition(
        session_id="returning",
        epoch=1,
        round_id=0,
        start=0,
        prefix_hash=b"",
        token_ids=np.arange(PROMPT_TOKENS, dtype=np.uint32) % 31,
        filters=SamplingFilters(temperature=0.0),
        seed=0,
        turn=0,
        output_start=PROMPT_TOKENS,
        draw_rule=DrawRule.DISTRIBUTION,
    )


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
