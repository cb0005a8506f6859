"""Drafts candidate tokens: one logit row, one token, one more step, up to gamma of them.

q is what was sampled: the law is filtered, cut to a support and rounded to integers first, and the token is drawn from
those very integers. Sessions at different depths of their drafts share steps; each row is drawn from its own
counter-based stream, so the company does not matter.

Not here: threads and steps (`specdec.engine.loop`), whether tokens are accepted (the coordinator), protobuf (the
servicer). Called by the draft service's servicer and by tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from specdec.core.random import DrawKey
from specdec.core.sparse import DEFAULT_COVERAGE, default_s_max, draw_from_support
from specdec.engine import sampling
from specdec.engine.admission import check_round, digest_of
from specdec.engine.base import Worker
from specdec.engine.job import Call, Job, RowKind, row_kind
from specdec.engine.replica import DEFAULT_MAX_GAMMA, ReplicaEngine, ReplicaOptions
from specdec.engine.sampling import LawContext
from specdec.engine.scheduler import DEFAULT_MAX_STEP_TOKENS
from specdec.errors import InvalidRequest
from specdec.types import LawParams, Proposal, ProposeRequest, Support

_NO_TOKENS = np.empty(0, dtype=np.uint32)


class Proposer(ReplicaEngine):
    """The draft service's engine (`specdec.engine.base.DraftEngine`) on a worker of its own."""

    role = "draft"

    def __init__(
        self,
        worker: Worker,
        *,
        replica_id: str = "local",
        model: str = "",
        pool: str = "default",
        max_gamma: int = DEFAULT_MAX_GAMMA,
        max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS,
        max_support: int | None = None,
        support_coverage: float = DEFAULT_COVERAGE,
    ) -> None:
        """Starts the device thread, which alone uses `worker` from now on.

        Args:
            worker: the draft model.
            replica_id: see `ReplicaOptions`, as the four after it.
            model: path or hub id.
            pool: name of the replica pool.
            max_gamma: most draft tokens a round.
            max_step_tokens: token budget of one step.
            max_support: most entries of a support, 1..MAX_SUPPORT; None for `default_s_max` of the vocabulary.
            support_coverage: share of the law a support covers unless `max_support` stops it, (0, 1].
        """
        s_max = default_s_max(worker.shape.vocabulary_size) if max_support is None else max_support
        options = ReplicaOptions(replica_id, model, pool, max_gamma, max_step_tokens)
        super().__init__(worker, _DraftProgram(s_max=s_max, coverage=support_coverage), options)

    async def propose(self, request: ProposeRequest) -> Proposal:
        """Drafts up to gamma tokens; see `DraftEngine.propose`.

        Fewer come back where the draft model's context ends (none at all beyond it) or after an end token.

        Raises:
            InvalidRequest: the request can never run; nothing of it is kept.
        """
        asked = request.round
        check_round(asked, self._shape.vocabulary_size)
        if not 1 <= request.gamma <= self._options.max_gamma:
            raise InvalidRequest(f"gamma is {request.gamma}, it must be in 1..{self._options.max_gamma}", field="gamma")
        gamma = min(request.gamma, self._shape.max_context_tokens - asked.committed_len)
        if gamma <= 0:
            return _proposal(_Draft(), kv_len=self._engine_loop.kv_len(asked.session_id))
        call = Call(
            request=replace(request, gamma=gamma),
            digest=digest_of(request),
            draft_token_ids=_NO_TOKENS,
            num_logit_rows=1,
            max_kv_len=asked.committed_len + gamma - 1,  # the last draft token is not run
        )
        proposal: Proposal = await self._engine_loop.call(call)
        return proposal

    async def warm_up(self) -> None:
        """Drafts in a session that is then forgotten, so that the first real call meets warm code."""
        for round_id, temperature in enumerate((0.0, 1.0)):
            warm_up_round = self._warm_up_round(round_id, LawParams(temperature=temperature))
            await self.propose(ProposeRequest(warm_up_round, gamma=min(2, self._options.max_gamma)))
        await self._release_warm_up()


@dataclass(slots=True)
class _Draft:
    """What one job has drafted so far."""

    token_ids: list[int] = field(default_factory=list)
    supports: list[Support] = field(default_factory=list)
    lost_mass: list[float] = field(default_factory=list)


class _DraftProgram:
    """Turns a step's logit rows into draft tokens. Device thread only."""

    def __init__(self, *, s_max: int, coverage: float) -> None:
        self._s_max = s_max
        self._coverage = coverage
        self._draw = {RowKind.GREEDY: _draw_greedy, RowKind.COUPLED: _draw_coupled, RowKind.LAW: self._draw_law}

    def advance(self, jobs: Sequence[Job], logits: torch.Tensor) -> None:
        """Draws one token a job from `logits` (float32 [len(jobs), V])."""
        rows_of: dict[RowKind, list[int]] = {}
        for row, job in enumerate(jobs):
            rows_of.setdefault(row_kind(job.call.round), []).append(row)
        for kind, rows_of_kind in rows_of.items():
            for rows in sampling.split_batches(rows_of_kind, lambda _: 1, logits.shape[-1]):
                drawn_by = [jobs[row] for row in rows]
                for job in drawn_by:
                    job.progress = job.progress or _Draft()
                token_ids = self._draw[kind](drawn_by, logits if len(rows) == len(jobs) else logits[rows])
                for job, token_id in zip(drawn_by, token_ids, strict=True):
                    _take(job, token_id)

    def _draw_law(self, jobs: Sequence[Job], logits: torch.Tensor) -> list[int]:
        laws = sampling.filtered_laws(logits, [_context(job) for job in jobs])
        token_ids = []
        for job, (support, lost_mass) in zip(
            jobs, sampling.cut_supports(laws, self._s_max, self._coverage), strict=True
        ):
            asked, draft = job.call.round, job.progress
            key = DrawKey(asked.seed, asked.turn, asked.committed_len)
            token_ids.append(draw_from_support(support, key, len(draft.token_ids)))
            draft.supports.append(support)
            draft.lost_mass.append(lost_mass)
        return token_ids


def _draw_greedy(jobs: Sequence[Job], logits: torch.Tensor) -> list[int]:
    return sampling.greedy_choices(logits, [_context(job) for job in jobs])


def _draw_coupled(jobs: Sequence[Job], logits: torch.Tensor) -> list[int]:
    laws = sampling.filtered_laws(logits, [_context(job) for job in jobs])
    token_ids, _ = sampling.coupled_choices(
        laws,
        [job.call.round.seed for job in jobs],
        [job.call.round.turn for job in jobs],
        [len(job.token_ids) for job in jobs],
    )
    return token_ids


def _context(job: Job) -> LawContext:
    return LawContext(job.call.round.law, job.token_ids, job.call.round.output_start)


def _take(job: Job, token_id: int) -> None:
    """Adds a drawn token to the draft, and ends it or goes on.

    Stopping after an end token is exact: it is decided by the tokens already drawn.
    """
    draft: _Draft = job.progress
    draft.token_ids.append(token_id)
    request = job.call.request
    if len(draft.token_ids) == request.gamma or token_id in request.round.law.end_token_ids:
        job.finish(
            _proposal(draft, kv_len=job.kv_len, num_cached_tokens=job.num_cached_tokens, forward_s=job.elapsed_s)
        )
    else:
        job.append(token_id)


def _proposal(draft: _Draft, *, kv_len: int, num_cached_tokens: int = 0, forward_s: float = 0.0) -> Proposal:
    return Proposal(
        draft_token_ids=np.array(draft.token_ids, dtype=np.uint32),
        supports=tuple(draft.supports),
        lost_mass=tuple(draft.lost_mass),
        kv_len=kv_len,
        num_cached_tokens=num_cached_tokens,
        forward_s=forward_s,
    )
