"""The common part of a draft replica and a target replica: identity, device loop and load.

`draft_service.proposer` and `target_service.verifier` build on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdec.contract.constraint import Constraint
from specdec.contract.engine_api import EndedTurn, EngineInfo, EngineStats
from specdec.contract.types import BLOCK_TOKENS, DrawRule, SamplingFilters, SessionPosition
from specdec.contract.version import __version__
from specdec.engine.base import StepObserver, Worker
from specdec.engine.cold_tier import RUN_BLOCKS, ColdTier
from specdec.engine.loop.constraint_masks import ConstraintMasks
from specdec.engine.loop.device_loop import EngineLoop
from specdec.engine.loop.idle_drafting import IdleDrafting
from specdec.engine.loop.job import Program
from specdec.engine.schedule.scheduler import DEFAULT_MAX_STEP_TOKENS, DEFAULT_PREFILL_BUDGET_S
from specdec.engine.sessions.calls import DEFAULT_LIMITS, DEFAULT_MAX_RUN
from specdec.engine.sessions.kv_queue import WaitLimits
from specdec.structured.known_constraints import KnownConstraints

# Braces: the store refuses such an id, so it is never a client's session.
_WARM_UP_SESSION = "{warm-up}"

#: Default of `ReplicaOptions.kv_reserve_tokens`.
DEFAULT_KV_RESERVE_TOKENS = 4096

#: Tokens of the prompt that measures prefill, with which fetching KV competes: the longest that is not a whole run.
_WARM_UP_PROMPT_TOKENS = RUN_BLOCKS * BLOCK_TOKENS - 1


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Identity and limits of a replica, and its cold tier."""

    replica_id: str = "local"
    """Unique name of this process in its pool."""
    model: str = ""
    """Path or hub id, as given; only reported."""
    pool: str = "default"
    """Name of the replica pool; only reported."""
    max_gamma: int = 16
    """Limit on the draft tokens of a round."""
    max_run: int = DEFAULT_MAX_RUN
    """Limit on the tokens of a target's run ahead of the committed ones."""
    max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS
    """Token budget of one step."""
    prefill_budget_s: float = DEFAULT_PREFILL_BUDGET_S
    """Seconds that prefill may add to a step that calls run in or may wait for."""
    shadow: bool = False
    """True if requests use the pool by name or promotion alone; only reported."""
    kv_tier: ColdTier | None = None
    """Store of KV blocks outside this replica; None for none."""
    kv_reserve_tokens: int = DEFAULT_KV_RESERVE_TOKENS
    """Largest number of a turn's output tokens for which KV blocks are reserved."""
    wait_limits: WaitLimits = DEFAULT_LIMITS
    """Bounds on the first calls of turns that wait for KV blocks. Drafts never wait."""


#: Options of a replica outside any pool.
LOCAL_REPLICA = ReplicaOptions()


class ReplicaEngine:
    """Owner of the device loop, with the calls that do not depend on the role."""

    role: ClassVar[str]
    """Role: draft or target."""

    def __init__(
        self,
        worker: Worker,
        program: Program,
        options: ReplicaOptions,
        ahead: IdleDrafting | None = None,
        observer: StepObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
        constraints: KnownConstraints | None = None,
    ) -> None:
        """Start the device thread, which alone uses `worker` from now on; the other arguments as in `EngineLoop`.

        `constraints` are those that calls may have; None if they may have none.
        """
        self._shape = worker.shape
        self._options = options
        self._constraints = constraints
        self._engine_loop = EngineLoop(
            worker,
            program,
            max_step_tokens=options.max_step_tokens,
            prefill_budget_s=options.prefill_budget_s,
            clock=clock,
            ahead=ahead,
            observer=observer,
            tier=options.kv_tier,
            limits=options.wait_limits,
            masks=ConstraintMasks(program, constraints, observer),
        )

    async def release(self, session_ids: list[str]) -> None:
        """Free the KV of sessions. Idempotent; unknown ids are ignored."""
        await self._engine_loop.release(session_ids)

    async def end_turns(self, turns: list[EndedTurn]) -> None:
        """Abandon the calls of turns and give back the KV blocks reserved for them."""
        await self._engine_loop.end_turns(turns)

    async def _constraint_of(self, position: SessionPosition) -> Constraint | None:
        """Return the constraint of a call; None if it has none, or if this replica follows none.

        Raises as `KnownConstraints.constraint_of`.
        """
        return None if self._constraints is None else await self._constraints.constraint_of(position)

    def _reserved_len(self, position: SessionPosition) -> int:
        """Return the number of tokens for which a turn reserves KV blocks; 0 if its greatest length is not known."""
        most = position.output_start + self._options.kv_reserve_tokens
        return min(position.max_session_tokens, self._shape.max_context_tokens, most)

    def info(self) -> EngineInfo:
        """Return the identity of this replica and its current load."""
        load = self._engine_loop.load()
        return EngineInfo(
            version=__version__,
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
            max_run=self._options.max_run if self.role == "target" else 0,
            supports_constraints=self._constraints is not None,
            num_states=self._shape.num_states,
        )

    def stats(self) -> EngineStats:
        """Return the state and the counts of the device loop; see `Engine.stats`."""
        return self._engine_loop.stats()

    @property
    def is_stalled(self) -> bool:
        """True while the device hangs; every call fails until its step ends."""
        return self._engine_loop.is_stalled

    def check_integrity(self) -> None:
        """Check the KV block counts, while no call runs or after `close`.

        Raises:
            RuntimeError: a block is not owned as counted.
        """
        self._engine_loop.check_integrity()

    async def wait_ended(self) -> None:
        """Return once the engine has been closed.

        Raises:
            Internal: the engine broke down, or its device failed permanently. No call will be answered.
        """
        await self._engine_loop.wait_ended()

    async def close(self) -> None:
        """Finish the running calls, then free everything. Idempotent."""
        await self._engine_loop.close()

    async def _prepare_constraints(self) -> None:
        """Build what constrained calls need, so that no call waits for it."""
        if self._constraints is not None:
            await asyncio.to_thread(self._constraints.prepare)

    async def _release_warm_up(self) -> None:
        await self.release([_WARM_UP_SESSION])

    def _warm_up_prompts(self) -> list[SessionPosition]:
        """Return rounds that measure prefill; the cold tier needs the measurement before the first call."""
        if self._options.kv_tier is None:
            return []
        return [self._warm_up_round(99, SamplingFilters(temperature=0.0), _WARM_UP_PROMPT_TOKENS)]

    def _warm_up_round(
        self, round_id: int, filters: SamplingFilters, num_tokens: int = 2 * BLOCK_TOKENS
    ) -> SessionPosition:
        """Return a round of the warm-up session."""
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
