"""What a draft replica and a target replica have in common: an identity, a loop, a load.

Not here: drafting and verifying (`draft_service.proposer`, `target_service.verifier`, which build on this).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import specdec
from specdec.engine.base import StepObserver, Worker
from specdec.engine.cold_tier import RUN_BLOCKS, ColdTier
from specdec.engine.loop.device_loop import EngineLoop
from specdec.engine.loop.idle_drafting import IdleDrafting
from specdec.engine.loop.job import Program
from specdec.engine.schedule.scheduler import DEFAULT_MAX_STEP_TOKENS, DEFAULT_PREFILL_BUDGET_S
from specdec.types import BLOCK_TOKENS, DrawRule, EngineInfo, SamplingFilters, SessionPosition

# Braces: no id that the store takes, so never a caller's session.
_WARM_UP_SESSION = "{warm-up}"

#: Tokens of a prompt by which prefill is measured where fetching KV competes with it: as long as can be and no run.
_WARM_UP_PROMPT_TOKENS = RUN_BLOCKS * BLOCK_TOKENS - 1


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Identity and limits of a replica, and what it shares with others."""

    replica_id: str = "local"
    """Unique name of this process in its pool."""
    model: str = ""
    """Path or hub id, as given; only reported."""
    pool: str = "default"
    """Name of the replica pool; only reported."""
    max_gamma: int = 16
    """Most draft tokens a round."""
    max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS
    """Token budget of one step."""
    prefill_budget_s: float = DEFAULT_PREFILL_BUDGET_S
    """By how much, in seconds, prefill may lengthen a step that calls are in or may have to wait for."""
    shadow: bool = False
    """Whether requests get it by name or promotion alone; only reported."""
    kv_tier: ColdTier | None = None
    """Where KV blocks are kept beyond this replica; None: nowhere."""


#: Of a replica that no pool knows.
LOCAL_REPLICA = ReplicaOptions()


class ReplicaEngine:
    """Owns the loop and answers what does not depend on the role."""

    role: ClassVar[str]
    """draft | target."""

    def __init__(
        self,
        worker: Worker,
        program: Program,
        options: ReplicaOptions,
        ahead: IdleDrafting | None = None,
        observer: StepObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the device thread, which alone uses `worker` from now on; the last three as in `EngineLoop`."""
        self._shape = worker.shape
        self._options = options
        self._engine_loop = EngineLoop(
            worker,
            program,
            max_step_tokens=options.max_step_tokens,
            prefill_budget_s=options.prefill_budget_s,
            clock=clock,
            ahead=ahead,
            observer=observer,
            tier=options.kv_tier,
        )

    async def release(self, session_ids: list[str]) -> None:
        """Frees sessions' KV. Idempotent; unknown ids are fine."""
        await self._engine_loop.release(session_ids)

    def info(self) -> EngineInfo:
        """What this replica is, with its load now."""
        load = self._engine_loop.load()
        return EngineInfo(
            version=specdec.__version__,
            role=self.role,
            pool=self._options.pool,
            replica_id=self._options.replica_id,
            model=self._options.model,
            model_fingerprint=self._shape.model_fingerprint,
            vocabulary_fingerprint=self._shape.vocabulary_fingerprint,
            vocabulary_size=self._shape.vocabulary_size,
            max_context_tokens=self._shape.max_context_tokens,
            eos_token_ids=self._shape.eos_token_ids,
            max_gamma=self._options.max_gamma,
            num_kv_blocks=self._shape.num_kv_blocks,
            kv_block_tokens=BLOCK_TOKENS,
            kv_usage=load.kv_usage,
            num_sessions=load.num_sessions,
            num_running=load.num_running,
            draining=load.draining,
            dtype=self._shape.dtype,
            device=self._shape.device,
            local_drafts=self._shape.local_drafts,
            shadow=self._options.shadow,
            local_gammas=self._shape.local_gammas,
            num_steps=load.num_steps,
            step_limit_s=load.step_limit_s,
        )

    @property
    def is_stalled(self) -> bool:
        """Whether the device hangs; every call fails until its step ends."""
        return self._engine_loop.is_stalled

    def share_event_loop(self) -> asyncio.AbstractEventLoop | None:
        """The device thread's own; see `EngineLoop.share_event_loop`."""
        return self._engine_loop.share_event_loop()

    def check_integrity(self) -> None:
        """Checks the KV books; only while no call is in flight, or after `close`.

        Raises:
            RuntimeError: a block is owned otherwise than counted.
        """
        self._engine_loop.check_integrity()

    async def wait_ended(self) -> None:
        """Returns once the engine has been closed.

        Raises:
            Internal: it broke down by itself, or its device failed for good; nothing will be answered any more.
        """
        await self._engine_loop.wait_ended()

    async def close(self) -> None:
        """Finishes what is in flight, then frees everything. Idempotent."""
        await self._engine_loop.close()

    async def _release_warm_up(self) -> None:
        await self.release([_WARM_UP_SESSION])

    def _warm_up_prompts(self) -> list[SessionPosition]:
        """Rounds that show what prefill takes, for whoever must know that before the first call."""
        if self._options.kv_tier is None:
            return []
        return [self._warm_up_round(99, SamplingFilters(temperature=0.0), _WARM_UP_PROMPT_TOKENS)]

    def _warm_up_round(
        self, round_id: int, filters: SamplingFilters, num_tokens: int = 2 * BLOCK_TOKENS
    ) -> SessionPosition:
        """A round of a session that no caller has."""
        num_tokens = max(1, min(num_tokens, self._shape.max_context_tokens - 2))
        return SessionPosition(
            session_id=_WARM_UP_SESSION,
            epoch=0,
            round_id=round_id,
            start=0,
            prefix_hash=b"",
            token_ids=np.zeros(num_tokens, dtype=np.uint32),
            filters=filters,
            seed=0,
            turn=0,
            output_start=0,
            draw_rule=DrawRule.DISTRIBUTION,
        )
