"""The target service's program: turn a step's logit rows into verifications and into tokens of local drafts.

The answer for L draft tokens has L + 1 rows, the last one for the bonus token. It goes to
`specdec.engine.sessions.calls`, which stores it and sends it to the waiters. `specdec.engine.drafting.drawing` samples
draft tokens; the coordinator decides. Called by the engine loop on the device thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from specdec.contract.types import (
    DistributionRow,
    LogitRow,
    Proposal,
    Score,
    ScoreRequest,
    TokenIds,
    Verification,
    VerifyRequest,
)
from specdec.core.random import DrawKey
from specdec.engine.drafting.drawing import Drawing, DrawnDraft
from specdec.engine.logits.filters import filtered_distributions, greedy_choices, split_batches
from specdec.engine.logits.penalties import FilterContext
from specdec.engine.logits.rows import coupled_choices, distribution_rows, logit_rows
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.loop.job import Job, Program, RowKind, row_kind
from specdec.engine.sessions.concurrent_rounds import ConcurrentRounds, OtherAnswers

_NO_TOKENS = np.empty(0, dtype=np.uint32)
_NO_PROBABILITIES = np.empty(0, dtype=np.float64)


@dataclass(slots=True)
class _Rows:
    """The logit rows of one job, and their answers."""

    job: Job
    first: int
    """Index of the job's first row in the step's logits."""
    choice_token_ids: TokenIds = field(default_factory=lambda: _NO_TOKENS)
    choice_probabilities: NDArray[np.float64] = field(default_factory=lambda: _NO_PROBABILITIES)
    distribution_rows: tuple[DistributionRow, ...] = ()
    logit_rows: tuple[LogitRow, ...] = ()

    @property
    def request(self) -> VerifyRequest:
        request = self.job.call.request
        assert isinstance(request, VerifyRequest)  # this service takes no other requests
        return request

    @property
    def draft(self) -> DrawnDraft | None:
        """Local draft of the job."""
        draft: DrawnDraft | None = self.job.progress
        return draft

    @property
    def num_draft_tokens(self) -> int:
        return self.job.num_logit_rows - 1

    @property
    def indices(self) -> range:
        return range(self.first, self.first + self.job.num_logit_rows)

    @property
    def contexts(self) -> list[FilterContext]:
        """Return one filter context a row; its history includes the draft tokens before it."""
        position, start = self.request.position, self.job.round_start
        token_ids = self.job.token_ids
        return [
            FilterContext(position.filters, token_ids[: start + index], position.output_start, self.job.mask_of(index))
            for index in range(self.job.num_logit_rows)
        ]

    @property
    def support_ids(self) -> list[TokenIds]:
        """Return one support a row; empty at the bonus position, and in greedy and coupled rounds."""
        draft = self.draft
        supports = self.request.support_ids if draft is None else [support.token_ids for support in draft.supports]
        return [*supports, *[_NO_TOKENS] * (self.job.num_logit_rows - len(supports))]

    @property
    def tail_uniforms(self) -> list[float]:
        """Return the uniform that draws the tail token of each row. Each row of a run begins a round."""
        position, start = self.request.position, self.job.round_start
        if self.job.call.run is None:
            return DrawKey(position.seed, position.turn, start).tail_uniforms(self.num_draft_tokens)
        keys = (DrawKey(position.seed, position.turn, start + index) for index in range(self.job.num_logit_rows))
        return [uniform for key in keys for uniform in key.tail_uniforms(0)]

    @property
    def tail_ids(self) -> list[int]:
        """Return the tail token or the choice of each row; -1 if absent."""
        return [row.tail_token_id for row in self.distribution_rows] or self.choice_token_ids.tolist()


class TargetProgram(Program):
    """Program that turns a step's logit rows into answers, in batches of one kind. Device thread only."""

    def __init__(self, drawing: Drawing) -> None:
        """`drawing` samples local drafts."""
        self._drawing = drawing
        self._answers = ConcurrentRounds()
        self._look = {RowKind.GREEDY: _look_greedy, RowKind.COUPLED: _look_coupled, RowKind.DISTRIBUTION: _look_sampled}

    def draft(self, jobs: Sequence[Job], logits: StepLogits) -> None:
        """Sample or score a draft token for each job from its row of `logits`."""
        self._drawing.draw(jobs, logits)
        for job in jobs:
            request, draft = job.call.request, job.progress
            if isinstance(request, ScoreRequest):
                if draft.is_scored(request):
                    job.finish(Score(tuple(draft.q), forward_s=job.elapsed_s))
                else:
                    job.append(draft.token_ids[-1])
                continue
            assert isinstance(request, VerifyRequest)
            assert request.local_draft is not None
            job.append(draft.token_ids[-1])
            if draft.is_complete(request.local_draft.gamma, request.position.filters):
                job.end_draft()

    def advance(self, jobs: Sequence[Job], logits: StepLogits) -> None:
        """Answer every job from its `num_logit_rows` rows of `logits`. Runs go on; all others are finished."""
        if jobs[0].call.preemptible:  # such a job is alone: the tokens to be scored have run
            jobs[0].finish(Score((), forward_s=jobs[0].elapsed_s))
            return
        first = 0
        all_rows: list[_Rows] = []
        by_kind: dict[RowKind, list[_Rows]] = {}
        with_logprobs: dict[int, list[_Rows]] = {}
        for job in jobs:
            rows = _Rows(job, first)
            if rows.draft is not None:
                rows.draft.cut(rows.num_draft_tokens)  # a token whose sampling failed has not run
            first += job.num_logit_rows
            all_rows.append(rows)
            by_kind.setdefault(row_kind(rows.request.position), []).append(rows)
            if rows.request.num_logprobs is not None:
                with_logprobs.setdefault(rows.request.num_logprobs, []).append(rows)
        for kind, group in by_kind.items():
            for batch in _batches_of(group, logits):
                self._look[kind](batch, _logits_of(batch, logits))
        for num_logprobs, group in with_logprobs.items():
            for batch in _batches_of(group, logits):
                _add_logit_rows(batch, _logits_of(batch, logits), num_logprobs)
        num_runs = sum(job.call.run is not None for job in jobs)
        for rows in all_rows:
            rows.job.conclude(_answers(rows, self._others(rows.job, num_runs)), rows.tail_ids)

    def _others(self, job: Job, num_runs: int) -> OtherAnswers:
        """Count the answer of a job in a step with `num_runs` runs; return those to other sessions since its last."""
        if job.call.run is None:
            return self._answers.note(job.sequence, job.num_logit_rows, num_runs)
        self._answers.pass_over(job.sequence)
        return OtherAnswers()


def _batches_of(group: Sequence[_Rows], logits: StepLogits) -> list[list[_Rows]]:
    return split_batches(group, lambda rows: len(rows.indices), logits.num_tokens)


def _logits_of(group: Sequence[_Rows], logits: StepLogits) -> StepLogits:
    return logits.select([index for rows in group for index in rows.indices])


def _contexts_of(group: Sequence[_Rows]) -> list[FilterContext]:
    return [context for rows in group for context in rows.contexts]


def _look_greedy(group: Sequence[_Rows], logits: StepLogits) -> None:
    choices = iter(greedy_choices(logits, _contexts_of(group)))
    for rows in group:
        rows.choice_token_ids = np.array([next(choices) for _ in rows.indices], dtype=np.uint32)
        rows.choice_probabilities = np.ones(len(rows.indices), dtype=np.float64)


def _look_coupled(group: Sequence[_Rows], logits: StepLogits) -> None:
    contexts = _contexts_of(group)
    positions = [rows.request.position for rows in group for _ in rows.indices]
    choices, probabilities = coupled_choices(
        filtered_distributions(logits.values, contexts),
        [position.seed for position in positions],
        [position.turn for position in positions],
        [len(context.history) for context in contexts],
    )
    first = 0
    for rows in group:
        end = first + len(rows.indices)
        rows.choice_token_ids = np.array(choices[first:end], dtype=np.uint32)
        rows.choice_probabilities = np.array(probabilities[first:end], dtype=np.float64)
        first = end


def _look_sampled(group: Sequence[_Rows], logits: StepLogits) -> None:
    uniforms: list[float] = []
    for rows in group:
        uniforms += rows.tail_uniforms
    answered = iter(
        distribution_rows(
            filtered_distributions(logits.values, _contexts_of(group)),
            [support_ids for rows in group for support_ids in rows.support_ids],
            uniforms,
        )
    )
    for rows in group:
        rows.distribution_rows = tuple(next(answered) for _ in rows.indices)


def _add_logit_rows(group: Sequence[_Rows], logits: StepLogits, num_logprobs: int) -> None:
    answered = iter(
        logit_rows(
            logits.values,
            [support_ids for rows in group for support_ids in rows.support_ids],
            [tail_id for rows in group for tail_id in rows.tail_ids],
            num_logprobs,
        )
    )
    for rows in group:
        rows.logit_rows = tuple(next(answered) for _ in rows.indices)


def _verification(rows: _Rows, others: OtherAnswers) -> Verification:
    return Verification(
        choice_token_ids=rows.choice_token_ids,
        choice_probabilities=rows.choice_probabilities,
        rows=rows.distribution_rows,
        logit_rows=rows.logit_rows,
        kv_len=rows.job.kv_len,
        num_cached_tokens=rows.job.num_cached_tokens,
        forward_s=rows.job.step_s,
        step_tokens=rows.job.step_tokens,
        num_concurrent=others.num_rounds,
        num_other_rows=others.num_rows,
        drafted=_drafted(rows),
        stages=rows.job.stages,
    )


def _answers(rows: _Rows, others: OtherAnswers) -> list[Verification]:
    """Return the answer of a call; of a run, the answers of its steps, one a row, the first of which took the time."""
    whole = _verification(rows, others)
    if rows.job.call.run is None:
        return [whole]
    start, cached = rows.job.round_start, rows.job.num_cached_tokens
    return [
        replace(
            whole,
            choice_token_ids=whole.choice_token_ids[index : index + 1],
            choice_probabilities=whole.choice_probabilities[index : index + 1],
            rows=whole.rows[index : index + 1],
            logit_rows=whole.logit_rows[index : index + 1],
            kv_len=start + index,
            num_cached_tokens=cached + index,
            forward_s=0.0 if index else whole.forward_s,
        )
        for index in range(rows.job.num_logit_rows)
    ]


def _drafted(rows: _Rows) -> Proposal | None:
    if rows.draft is None or not rows.draft.token_ids:
        return None
    job = rows.job
    return rows.draft.proposal(kv_len=job.kv_len, num_cached_tokens=job.num_cached_tokens, forward_s=job.draft_s)
