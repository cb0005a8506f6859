"""The draft service's program: sample one token a step until a draft is complete.

`specdec.engine.loop.steps` gives the logits and runs each token next. The last token ends the call, and its draft goes
to `specdec.engine.sessions.calls`. `specdec.engine.drafting.drawing` samples a token. Called by the engine loop and by
`predraft`.

Committed tokens are scored by the same filters, cut and rounding: q of each is the probability with which this draft
would have sampled it. In greedy and coupled rounds q is 1 if the draft's choice is the token, else 0. The coordinator,
which knows p, derives the acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specdec.contract.types import Proposal, ProposeRequest, Score, ScoreRequest, Support
from specdec.core.sparse import probability
from specdec.engine.base import MultiStepDrafts
from specdec.engine.drafting.drawing import Drawing, DrawnDraft
from specdec.engine.drafting.multi_step import DeviceMultiStep, GreedyMultiStep
from specdec.engine.drafting.multi_step_policy import MultiStepPolicy
from specdec.engine.logits.filters import filtered_distributions, greedy_choices
from specdec.engine.logits.penalties import FilterContext
from specdec.engine.logits.rows import coupled_choices
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.loop.job import Job, MultiStepDraft, Program, RowKind, row_kind
from specdec.engine.sessions.calls import Call

#: Function that cuts distributions (float64 [R, V]) to supports, each with the mass outside it.
Cut = Callable[[torch.Tensor], Sequence[tuple[Support, float]]]


def score_of(job: Job, logits: StepLogits, cut: Cut) -> Score:
    """Return the answer to a `ScoreRequest`.

    Args:
        job: job whose tokens have run: those of its position, then the scored ones but the last.
        logits: a row for each scored token, from the position before it.
        cut: cut of this replica's drafts.
    """
    request = job.call.request
    assert isinstance(request, ScoreRequest)
    position, scored = request.position, request.token_ids.tolist()
    contexts = [
        FilterContext(
            position.filters,
            job.token_ids[: position.committed_len + index],
            position.output_start,
            job.mask_of(index),
        )
        for index in range(len(scored))
    ]
    kind = row_kind(position)
    if kind is RowKind.DISTRIBUTION:
        supports = cut(filtered_distributions(logits.values, contexts))
        q = [probability(token_id, support) for token_id, (support, _) in zip(scored, supports, strict=True)]
    else:
        choices = greedy_choices(logits, contexts) if kind is RowKind.GREEDY else _coupled(request, logits, contexts)
        q = [float(choice == token_id) for choice, token_id in zip(choices, scored, strict=True)]
    return Score(tuple(q), forward_s=job.elapsed_s)


def _coupled(request: ScoreRequest, logits: StepLogits, contexts: Sequence[FilterContext]) -> list[int]:
    position, num_rows = request.position, len(contexts)
    distributions = filtered_distributions(logits.values, contexts)
    positions = [len(context.history) for context in contexts]
    choices, _ = coupled_choices(distributions, [position.seed] * num_rows, [position.turn] * num_rows, positions)
    return choices


class DraftProgram(Program):
    """Program that turns a step's logit rows into draft tokens. Device thread only."""

    def __init__(self, *, s_max: int, coverage: float, num_tokens: int, top_n: int = 0, max_noted: int = 0) -> None:
        """
        Args:
            s_max: as in `Drawing`.
            coverage: as in `Drawing`.
            num_tokens: size of the vocabulary of drafts.
            top_n: as in `Drawing`.
            max_noted: limit on the jobs of a step that note their top tokens; a larger step notes none, to save time.
        """
        self._drawing = Drawing(s_max=s_max, coverage=coverage, top_n=top_n)
        self._policy = MultiStepPolicy(s_max=s_max, num_tokens=num_tokens)
        self._top_n = top_n
        self._max_noted = max_noted

    def advance(self, jobs: Sequence[Job], logits: StepLogits) -> None:
        """Sample one token for each job from its row of `logits`, and end or continue the job."""
        if jobs[0].call.preemptible:  # such a job is alone in its step
            jobs[0].finish(score_of(jobs[0], logits, self._drawing.cut))
            return
        self.draw(jobs, logits, is_noted=len(jobs) <= self._max_noted)

    def draw(self, jobs: Sequence[Job], logits: StepLogits, *, is_noted: bool = True) -> None:
        """Do the work of `advance`; with `is_noted`, drafts also note their top tokens."""
        self._drawing.draw(jobs, logits, is_noted=is_noted)
        for job in jobs:
            _go_on(job)

    def multi_step_draft(self, jobs: Sequence[Job], kind: MultiStepDrafts) -> MultiStepDraft | None:
        """Return a multi-step draft of the steps that all jobs need; see `Program.multi_step_draft`."""
        if jobs[0].call.preemptible:
            return None
        top_n = self._top_n if len(jobs) <= self._max_noted else 0
        num_steps = min(
            request_of(job.call).gamma - (len(job.progress.token_ids) if job.progress else 0) for job in jobs
        )
        if num_steps < 2 or not self._policy.allows(jobs, kind, top_n):
            return None
        if kind is MultiStepDrafts.GREEDY:
            return GreedyMultiStep(jobs, num_steps, _go_on)
        return DeviceMultiStep(self._drawing, self._policy, jobs, num_steps, top_n, _go_on)

    def guess(self, jobs: Sequence[Job], logits: StepLogits) -> list[list[int]]:
        """Return guesses of the next tokens; see `Drawing.guess`."""
        return self._drawing.guess(jobs, logits)


def request_of(call: Call) -> ProposeRequest:
    """Return a call's request; this service takes only `ProposeRequest`."""
    assert isinstance(call.request, ProposeRequest)
    return call.request


def proposal_of(job: Job) -> Proposal:
    """Return the answer of a job's draft."""
    draft: DrawnDraft = job.progress
    last_run_len = job.call.position.committed_len + len(draft.token_ids) - 1  # the last draft token does not run
    return draft.proposal(
        kv_len=min(job.kv_len, last_run_len),
        num_cached_tokens=job.num_cached_tokens,
        forward_s=job.elapsed_s,
        stages=job.stages,
    )


def _go_on(job: Job) -> None:
    """End a job whose draft or score is complete, or run its newest token."""
    request, draft = job.call.request, job.progress
    if isinstance(request, ScoreRequest):
        if draft.is_scored(request):
            job.finish(Score(tuple(draft.q), forward_s=job.elapsed_s))
            return
    elif is_complete(job):
        job.finish(proposal_of(job))
        return
    job.append(draft.token_ids[-1])


def is_complete(job: Job) -> bool:
    """Return whether a draft has all requested tokens, or an end token."""
    request, draft = request_of(job.call), job.progress
    return bool(draft.is_complete(request.gamma, request.position.filters))
