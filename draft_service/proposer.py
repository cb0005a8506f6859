"""The engine of the draft service: draft up to gamma tokens, one token a step.

A checked round goes, as a `Call`, to the device thread (`specdec.engine.loop.device_loop`). `drafting` samples the
tokens. Called by the draft service's servicer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

import numpy as np

from draft_service.drafting import DraftProgram
from draft_service.fan_out_policy import Predraft
from draft_service.predraft import MAX_TREES, NUM_LIKELIEST, Predrafter, PredraftObserver
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.contract.types import Proposal, ProposeRequest, SamplingFilters, Score, ScoreRequest
from specdec.core.sparse import DEFAULT_COVERAGE, default_s_max
from specdec.engine.base import StepObserver, Worker
from specdec.engine.loop.replica_engine import LOCAL_REPLICA, ReplicaEngine, ReplicaOptions
from specdec.engine.sessions.calls import Call, identity_of
from specdec.engine.sessions.kv_queue import WaitLimits
from specdec.structured.known_constraints import KnownConstraints

_NO_TOKENS = np.empty(0, dtype=np.uint32)


class ProposerObserver(StepObserver, PredraftObserver, Protocol):
    """Receiver of steps and of pre-drafting statistics."""


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Options of drafting."""

    max_support: int | None = None
    """Limit on the entries of a support, 1..MAX_SUPPORT; None: `default_s_max` of the vocabulary."""
    support_coverage: float = DEFAULT_COVERAGE
    """Share of the distribution that a support covers within `max_support` entries, (0, 1]."""
    predraft: Predraft = Predraft.OFF
    """Mode of pre-drafting (experimental)."""


_PLAIN_DRAFTS = DraftOptions()


class Proposer(ReplicaEngine):
    """The draft service's engine (`specdec.contract.engine_api.DraftEngine`) on its own worker."""

    role = "draft"

    def __init__(
        self,
        worker: Worker,
        options: ReplicaOptions = LOCAL_REPLICA,
        drafting: DraftOptions = _PLAIN_DRAFTS,
        *,
        observer: ProposerObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
        constraints: KnownConstraints | None = None,
    ) -> None:
        """Start the device thread, which alone uses `worker` from now on.

        Args:
            worker: the draft model.
            options: identity and limits.
            drafting: supports and pre-drafting.
            observer: receives steps and pre-drafting statistics.
            clock: clock of steps and rounds, in seconds.
            constraints: constraints by which q is masked; None: q ignores them.
        """
        s_max = drafting.max_support
        is_ahead = drafting.predraft is not Predraft.OFF
        if is_ahead and worker.shape.num_states:
            raise Unsupported(
                "a draft model with recurrent layers does not draft ahead; remove --predraft", field="predraft"
            )
        program = DraftProgram(
            s_max=default_s_max(worker.shape.vocabulary_size) if s_max is None else s_max,
            coverage=drafting.support_coverage,
            num_tokens=worker.shape.vocabulary_size,
            top_n=NUM_LIKELIEST if is_ahead else 0,
            max_noted=MAX_TREES,
        )
        ahead = Predrafter(
            program,
            policy=drafting.predraft,
            max_context_tokens=worker.shape.max_context_tokens,
            observer=observer,
            clock=clock,
        )
        # A draft that waits is late; without it the round goes on.
        options = replace(options, wait_limits=WaitLimits(max_waiting=0))
        super().__init__(worker, program, options, ahead if is_ahead else None, observer, clock, constraints)
        self._score_ids = count()

    async def propose(self, request: ProposeRequest) -> Proposal:
        """Draft up to gamma tokens; see `DraftEngine.propose`.

        The draft is shorter at the end of the draft model's context (and empty beyond it) and after an end token.
        """
        position = request.position
        gamma = min(request.gamma, self._shape.max_context_tokens - position.committed_len)
        if gamma <= 0:
            return no_draft(kv_len=self._engine_loop.kv_len(position.session_id))
        call = Call(
            request=replace(request, gamma=gamma),
            identity=identity_of(request),
            draft_token_ids=_NO_TOKENS,
            num_logit_rows=1,
            max_kv_len=position.committed_len + gamma - 1,  # the last draft token does not run
            reserved_len=self._reserved_len(position),
            constraint=await self._constraint_of(position),
            may_refuse=position.max_session_tokens > 0,  # a turn gets along without a draft
        )
        proposal: Proposal = await self._engine_loop.call(call)
        return proposal

    async def score(self, request: ScoreRequest) -> Score:
        """Return the distributions in which this draft would have sampled the tokens; see `DraftEngine.score`."""
        position = request.position
        num_tokens = position.committed_len + len(request.token_ids)
        if num_tokens - 1 > self._shape.max_context_tokens:
            raise InvalidRequest(
                f"{num_tokens} tokens, the context is {self._shape.max_context_tokens}",
                reason="CONTEXT_TOO_LONG",
                field="round.token_ids",
            )
        # A private session, so that the scored one keeps its KV. Braces: no caller can have such an id.
        own = replace(position, session_id=f"{{score-{next(self._score_ids)}}}")
        call = Call(
            request=replace(request, position=own),
            identity=(),  # never repeated, because its session ends with its answer
            draft_token_ids=request.token_ids[:-1],
            num_logit_rows=len(request.token_ids),
            max_kv_len=num_tokens - 1,
            constraint=await self._constraint_of(position),
            preemptible=True,
        )
        score: Score = await self._engine_loop.call(call)
        return replace(score, step_s=self._engine_loop.usual_step_s(num_tokens))

    async def warm_up(self) -> None:
        """Draft in a session that is then forgotten, so that the first real call runs warm code."""
        await self._prepare_constraints()
        for round_id, temperature in enumerate((0.0, 1.0)):
            warm_up_round = self._warm_up_round(round_id, SamplingFilters(temperature=temperature))
            await self.propose(ProposeRequest(warm_up_round, gamma=min(2, self._options.max_gamma)))
        for prompt in self._warm_up_prompts():
            await self.propose(ProposeRequest(prompt, gamma=1))
        await self._release_warm_up()


def no_draft(kv_len: int) -> Proposal:
    """Return an empty draft, with the number of committed tokens that have KV."""
    return Proposal(_NO_TOKENS, supports=(), lost_mass=(), kv_len=kv_len, num_cached_tokens=0, forward_s=0.0)
