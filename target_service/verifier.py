"""The engine of the target service: run draft tokens through the target model in one pass and answer p at each of them.

A checked round goes, as a `Call`, to the device thread (`specdec.engine.loop.device_loop`).

The answer for L draft tokens has L + 1 rows, the last one for the bonus token. It never depends on q: supports only
name the tokens at which p is reported. A call with a `local_draft` instead of draft tokens is drafted first by this
replica's worker, and its draft is part of the answer. `program` computes the answers. Called by the target service's
servicer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np

from specdec.contract.errors import Unsupported
from specdec.contract.types import (
    LocalDraft,
    RunLimit,
    SamplingFilters,
    Score,
    ScoreRequest,
    SessionPosition,
    Verification,
    VerifyRequest,
)
from specdec.core.sparse import DEFAULT_COVERAGE, default_s_max
from specdec.engine.base import StepObserver, Worker
from specdec.engine.drafting.drawing import Drawing
from specdec.engine.loop.replica_engine import LOCAL_REPLICA, ReplicaEngine, ReplicaOptions
from specdec.engine.sessions.calls import Call, identity_of
from specdec.structured.known_constraints import KnownConstraints
from target_service.program import TargetProgram
from target_service.scoring import ScoredSpan, check_scorable

_NO_TOKENS = np.empty(0, dtype=np.uint32)


class Verifier(ReplicaEngine):
    """The target service's engine (`specdec.contract.engine_api.TargetEngine`) on its own worker."""

    role = "target"

    def __init__(
        self,
        worker: Worker,
        options: ReplicaOptions = LOCAL_REPLICA,
        *,
        observer: StepObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
        constraints: KnownConstraints | None = None,
    ) -> None:
        """Start the device thread, which alone uses `worker` from now on.

        Args:
            worker: the target model.
            options: identity and limits.
            observer: receives every step.
            clock: clock of the steps, in seconds.
            constraints: constraints on the model's vocabulary; None: calls with a constraint are refused.
        """
        drawing = Drawing(s_max=default_s_max(worker.shape.vocabulary_size), coverage=DEFAULT_COVERAGE)
        super().__init__(
            worker, TargetProgram(drawing), options, observer=observer, clock=clock, constraints=constraints
        )
        self._score_ids = count()

    async def verify(
        self, request: VerifyRequest, on_step: Callable[[Verification], None] | None = None
    ) -> Verification:
        """Return p at every draft position and one beyond; see `TargetEngine.verify`.

        A `local_draft` that this replica does not have, or for which its context is too short, gives an empty draft.
        """
        if request.position.filters.constraint_id and self._constraints is None:
            raise Unsupported("this target cannot follow constraints", field="constraint")
        constraint = await self._constraint_of(request.position)
        request = self._with_room(request)
        local = request.local_draft
        num_draft_tokens = len(request.draft_token_ids)
        call = Call(
            request=request,
            identity=identity_of(request),
            draft_token_ids=request.draft_token_ids,
            num_logit_rows=num_draft_tokens + 1,
            max_kv_len=request.position.committed_len + (num_draft_tokens if local is None else local.gamma),
            local_draft="" if local is None else local.pool,
            run=None if on_step is None else request.run,
            reserved_len=self._reserved_len(request.position),
            constraint=constraint,
            may_refuse=_is_first_of_turn(request.position),
        )
        verification: Verification = await self._engine_loop.call(call, on_step)
        return verification

    def renew(self, position: SessionPosition, until: int, committed_len: int) -> None:
        """Raise the limit of a run; see `TargetEngine.renew`."""
        most = min(committed_len + self._options.max_run, self._shape.max_context_tokens)
        self._engine_loop.renew(position, min(until, most), committed_len)

    async def score(self, request: ScoreRequest) -> Score:
        """Return the distributions with which a local draft would have sampled committed tokens; see
        `TargetEngine.score`."""
        check_scorable(request, self._shape)
        # Braces: no caller can have such an id.
        session_id = f"{{score-{next(self._score_ids)}}}"
        span = ScoredSpan(session_id, request, self._shape, await self._constraint_of(request.position))
        try:
            return await span.score(self._engine_loop.call)
        finally:
            await self._engine_loop.release([span.session_id])

    async def warm_up(self) -> None:
        """Verify in a session that is then forgotten, so that the first real call runs warm code.

        The last round gives the scheduler the time of a warm step.
        """
        await asyncio.gather(self._prepare_constraints(), self._run_warm_up_rounds(0.0, 1.0))
        await self._run_warm_up_rounds(0.0, first_round_id=2)
        for prompt in self._warm_up_prompts():
            await self.verify(VerifyRequest(prompt, _NO_TOKENS, ()))
        await self._release_warm_up()

    async def _run_warm_up_rounds(self, *temperatures: float, first_round_id: int = 0) -> None:
        draft = np.zeros(1, dtype=np.uint32)
        for round_id, temperature in enumerate(temperatures, first_round_id):
            warm_up_round = self._warm_up_round(round_id, SamplingFilters(temperature=temperature))
            await self.verify(VerifyRequest(warm_up_round, draft, support_ids=(draft,) if temperature else ()))

    def _with_room(self, request: VerifyRequest) -> VerifyRequest:
        """Return the request with its local draft or its run limited to the room in the context."""
        local, run, committed_len = request.local_draft, request.run, request.position.committed_len
        if run is not None:
            until = min(run.until, committed_len + self._options.max_run, self._shape.max_context_tokens)
            return replace(request, run=RunLimit(until, run.end_token_ids))
        if local is None:
            return request
        room = self._shape.max_context_tokens - request.position.committed_len
        most = dict(zip(self._shape.local_drafts, self._shape.local_gammas, strict=False)).get(local.pool)
        gamma = min(local.gamma, self._options.max_gamma, room, most or local.gamma)
        can_draft = local.pool in self._shape.local_drafts and gamma > 0
        return replace(request, local_draft=LocalDraft(local.pool, gamma) if can_draft else None)


def _is_first_of_turn(position: SessionPosition) -> bool:
    """Return whether a call belongs to a turn that states its greatest length and has no output yet."""
    return position.max_session_tokens > 0 and position.committed_len <= position.output_start
