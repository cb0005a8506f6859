"""Draft and target engines without a model: real calls, positions and batching, with modelled times and acceptance.

They serve to measure everything around a model. Gate, sessions, rollback, misses and stored answers are those of the
real engine (`specdec.engine.sessions`, through `specdec.engine.simulated.simulated_replica`). Forward passes are waits
(`specdec.engine.simulated.device`). Tokens and distributions come from a generator with a chosen acceptance
(`specdec.engine.simulated.text`). The network between coordinator and engine can be slowed down. The draft engine
pre-drafts as in docs/protocol.md section 6: after its answer the device drafts likely outcomes, and the next call is a
hit if the committed token was among them.

Filters, logprobs and the prompt's text are ignored, so these engines cannot prove exactness. The numbers are in
`specdec.engine.simulated.simulated_pair`. Built by the services' entry points for `--model simulated:70b-1b`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from specdec.contract.errors import InvalidRequest, ResourceExhausted, Unsupported
from specdec.contract.types import (
    DistributionRow,
    Proposal,
    ProposeRequest,
    Score,
    ScoreRequest,
    SessionPosition,
    Verification,
    VerifyRequest,
)
from specdec.core.random import DrawKey
from specdec.core.sparse import probability
from specdec.engine.sessions.calls import DEFAULT_MAX_RUN, Call, identity_of
from specdec.engine.sessions.concurrent_rounds import ConcurrentRounds
from specdec.engine.simulated.device import Branches, ModelledTime
from specdec.engine.simulated.simulated_pair import SimulatedPair
from specdec.engine.simulated.simulated_replica import MAX_CONTEXT_TOKENS, NO_TOKENS, SimulatedJob, SimulatedReplica
from specdec.engine.simulated.text import SimulatedText

_NO_PROBABILITIES = np.empty(0, dtype=np.float64)


class SimulatedDraft(SimulatedReplica):
    """A `specdec.contract.engine_api.DraftEngine` with its own simulated device."""

    role = "draft"

    @property
    def _forward(self) -> ModelledTime:
        return self._pair.draft

    async def propose(self, request: ProposeRequest) -> Proposal:
        """See `DraftEngine.propose`."""
        position = request.position
        gamma = min(request.gamma, MAX_CONTEXT_TOKENS - position.committed_len)
        proposal: Proposal = await self._gate.call(
            Call(
                replace(request, gamma=gamma),
                identity_of(request),
                NO_TOKENS,
                num_logit_rows=1,
                max_kv_len=position.committed_len + gamma - 1,
            )
        )
        return proposal

    async def score(self, request: ScoreRequest) -> Score:
        """See `DraftEngine.score`. The answer comes at once and states the time that it would have taken.

        Raises:
            ResourceExhausted: another call is running.
        """
        position = request.position
        if self._gate.calls.jobs:
            raise ResourceExhausted("this replica is busy with other requests", reason="REPLICA_BUSY")
        text = SimulatedText(self._pair.text, position)
        scored = enumerate(request.token_ids.tolist(), position.committed_len)
        if position.carries_distributions:
            q = [probability(token_id, text.support(at)) for at, token_id in scored]
        else:
            q = [float(text.draft_choice(at) == token_id) for at, token_id in scored]
        num_tokens = position.committed_len + len(request.token_ids) - 1
        return Score(tuple(q), forward_s=self._forward.step_s(num_tokens), step_s=self._pair.draft_step_s())

    def _begin(self, job: SimulatedJob, now_s: float) -> None:
        request = cast(ProposeRequest, job.call.request)
        position, gamma = request.position, request.gamma
        text = SimulatedText(self._pair.text, position)
        job.answer = proposal = _proposal(text, position, gamma, num_cached_tokens=job.num_cached_tokens)
        job.new_token_ids = proposal.draft_token_ids[:-1]
        branches = foresee = None
        if self._pair.predrafts:
            outcomes = range(position.committed_len + 1, position.committed_len + gamma + 2)
            branches = Branches(self._pair.num_branches(gamma), gamma + 1, outcomes)
            # Compute the tokens of a hit ahead of time, as a model would have drafted them.
            foresee = partial(text.foresee, range(outcomes[0], outcomes[-1] + gamma))
        self._submit(
            job,
            now_s,
            after=foresee,
            num_pending=max(1, job.sequence.num_pending),
            num_steps=gamma,
            is_hit=text.is_predicted(position.committed_len - 1),
            branches=branches,
        )


class SimulatedTarget(SimulatedReplica):
    """A `specdec.contract.engine_api.TargetEngine` with its own simulated device."""

    role = "target"

    def __init__(self, pair: SimulatedPair, *, max_run: int = DEFAULT_MAX_RUN, **options: Any) -> None:
        """See `SimulatedReplica`."""
        super().__init__(pair, max_run=max_run, **options)
        self._max_run = max_run
        self._answers = ConcurrentRounds()

    @property
    def _forward(self) -> ModelledTime:
        return self._pair.target

    async def verify(
        self, request: VerifyRequest, on_step: Callable[[Verification], None] | None = None
    ) -> Verification:
        """See `TargetEngine.verify`.

        Raises:
            InvalidRequest: the request asks for logprobs.
        """
        position, num_draft_tokens = request.position, len(request.draft_token_ids)
        if request.num_logprobs is not None:
            raise InvalidRequest("a simulated target cannot return logprobs", field="num_logprobs")
        verification: Verification = await self._gate.call(
            Call(
                request,
                identity_of(request),
                request.draft_token_ids,
                num_logit_rows=num_draft_tokens + 1,
                max_kv_len=position.committed_len + num_draft_tokens,
                run=None if on_step is None else request.run,
            ),
            on_step,
        )
        return verification

    def renew(self, position: SessionPosition, until: int, committed_len: int) -> None:
        """See `TargetEngine.renew`."""
        job = self._gate.calls.jobs.get(position.session_id)
        if job is None or job.work is None or job.call.position is not position:
            return
        if committed_len <= len(job.sequence):
            num_steps = min(until, committed_len + self._max_run, MAX_CONTEXT_TOKENS) - position.committed_len
            if num_steps > job.work.num_steps:
                self._device.set_end(job.work, num_steps, time.monotonic() + self._pair.link_delay_s)

    async def score(self, request: ScoreRequest) -> Score:
        """Raise Unsupported: a simulated target has no local drafts."""
        raise Unsupported("a simulated target has no local drafts to score with")

    def _begin(self, job: SimulatedJob, now_s: float) -> None:
        request, num_rows = cast(VerifyRequest, job.call.request), job.call.num_logit_rows
        text = SimulatedText(self._pair.text, request.position)
        num_tokens = max(num_rows, job.sequence.num_pending)
        num_steps = 1
        if job.call.run is not None:
            num_steps = min(job.call.run.until - request.position.committed_len, self._max_run)
        else:
            job.answer = _verification(text, request, num_cached_tokens=job.num_cached_tokens)
        self._submit(job, now_s, num_pending=num_tokens, num_logit_rows=num_rows, num_steps=num_steps)

    def _complete_step(self, job: SimulatedJob, step_s: float, step_tokens: int) -> None:
        answer = replace(self._answer_of_step(job), kv_len=len(job.sequence), forward_s=step_s, step_tokens=step_tokens)
        job.sequence.kv_len = len(job.sequence)
        self._gate.sessions.publish(job.sequence, job.call.position.committed_len)
        job.num_cached_tokens = len(job.sequence)
        job.sequence.append(np.array([answer.decided_token_id], dtype=np.uint32))
        self._gate.calls.make_room(job)
        self._gate.tell_step(job, answer)

    def _answer_of_step(self, job: SimulatedJob) -> Verification:
        request = cast(VerifyRequest, job.call.request)
        text = SimulatedText(self._pair.text, request.position)
        return _verification(text, request, num_cached_tokens=job.num_cached_tokens, committed_len=len(job.sequence))

    def _complete(self, job: SimulatedJob) -> None:
        if job.call.run is not None and self._gate.is_current(job):
            job.answer = self._answer_of_step(job)
        super()._complete(job)

    def _times(self, job: SimulatedJob) -> dict[str, Any]:
        if job.work is None:
            return {}
        if job.call.run is not None:
            self._answers.pass_over(job.sequence)
            return {"forward_s": job.work.step_s, "step_tokens": job.work.step_tokens}
        others = self._answers.note(job.sequence, job.call.num_logit_rows, job.work.step_runs)
        return {
            "forward_s": job.work.step_s,
            "step_tokens": job.work.step_tokens,
            "num_concurrent": others.num_rounds,
            "num_other_rows": others.num_rows,
        }


def _proposal(text: SimulatedText, position: SessionPosition, gamma: int, *, num_cached_tokens: int) -> Proposal:
    positions = range(position.committed_len, position.committed_len + gamma)
    if position.carries_distributions:
        token_ids = [text.draft_draw(index) for index in range(gamma)]
        supports = tuple(text.support(at) for at in positions)
    else:
        token_ids, supports = [text.draft_choice(at) for at in positions], ()
    return Proposal(
        draft_token_ids=np.array(token_ids, dtype=np.uint32),
        supports=supports,
        lost_mass=(0.0,) * len(supports),
        kv_len=0,
        num_cached_tokens=num_cached_tokens,
        forward_s=0.0,
    )


def _verification(
    text: SimulatedText, request: VerifyRequest, *, num_cached_tokens: int, committed_len: int = 0
) -> Verification:
    """Return the answer to a request; `committed_len` is that of a step of a run."""
    position, num_rows = request.position, len(request.draft_token_ids) + 1
    committed_len = committed_len or position.committed_len
    choices, probabilities = NO_TOKENS, _NO_PROBABILITIES
    rows: tuple[DistributionRow, ...] = ()
    positions = range(committed_len, committed_len + num_rows)
    if position.carries_distributions:
        uniforms = DrawKey(position.seed, position.turn, committed_len).tail_uniforms(num_rows - 1)
        support_ids = (*request.support_ids, NO_TOKENS)
        rows = tuple(map(text.distribution_row, positions, support_ids, uniforms))
    else:
        choices = np.array([text.target_choice(at) for at in positions], dtype=np.uint32)
        probabilities = np.ones(num_rows)
    return Verification(
        choice_token_ids=choices,
        choice_probabilities=probabilities,
        rows=rows,
        logit_rows=(),
        kv_len=0,
        num_cached_tokens=num_cached_tokens,
        forward_s=0.0,
        step_tokens=0,
    )
