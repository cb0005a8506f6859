"""The draft service's program: draws tokens, one a step, until a draft is complete.

Its logits come from `specdec.engine.loop.steps`. A token goes back there, to be run; the last one ends the call, whose
draft goes to `specdec.engine.sessions.calls`.

Not here: how a token is drawn (`specdec.engine.drafting.drawing`), requests and answers' way in and out (`proposer`),
drafting ahead (`predraft`), whether tokens are accepted (the coordinator). Called by the engine loop and by `predraft`.
"""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.scoring import score_of
from specdec.engine.base import MultiStepDrafts
from specdec.engine.drafting.device_multi_step import DeviceMultiStep
from specdec.engine.drafting.drawing import Draft, Drawing
from specdec.engine.drafting.greedy_multi_step import GreedyMultiStep
from specdec.engine.drafting.multi_step_policy import MultiStepPolicy
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.loop.job import Job, MultiStepDraft, Program
from specdec.engine.sessions.calls import Call
from specdec.types import Proposal, ProposeRequest, Score, ScoreRequest


class DraftProgram(Program):
    """Turns a step's logit rows into draft tokens. Device thread only."""

    def __init__(self, *, s_max: int, coverage: float, num_tokens: int, top_n: int = 0, max_noted: int = 0) -> None:
        """
        Args:
            s_max: as in `Drawing`.
            coverage: likewise.
            num_tokens: of the vocabulary that drafts are in.
            top_n: as in `Drawing`.
            max_noted: jobs of one step beyond which none of them notes the likeliest tokens: the step is in a hurry.
        """
        self._drawing = Drawing(s_max=s_max, coverage=coverage, top_n=top_n)
        self._runs = MultiStepPolicy(s_max=s_max, num_tokens=num_tokens)
        self._top_n = top_n
        self._max_noted = max_noted

    def advance(self, jobs: Sequence[Job], logits: StepLogits) -> None:
        """Draws one token a job from its row of `logits`, and ends the job or goes on."""
        if jobs[0].call.preemptible:  # and is alone
            jobs[0].finish(score_of(jobs[0], logits, self._drawing.cut))
            return
        self.draw(jobs, logits, is_noted=len(jobs) <= self._max_noted)

    def draw(self, jobs: Sequence[Job], logits: StepLogits, *, is_noted: bool = True) -> None:
        """As `advance`; `is_noted`: whether the drafts note the likeliest tokens."""
        self._drawing.draw(jobs, logits, is_noted=is_noted)
        for job in jobs:
            _go_on(job)

    def multi_step_draft(self, jobs: Sequence[Job], kind: MultiStepDrafts) -> MultiStepDraft | None:
        """Of as many steps as all of the jobs want; see `Program.multi_step_draft`."""
        if jobs[0].call.preemptible:
            return None
        top_n = self._top_n if len(jobs) <= self._max_noted else 0
        num_steps = min(
            request_of(job.call).gamma - (len(job.progress.token_ids) if job.progress else 0) for job in jobs
        )
        if num_steps < 2 or not self._runs.may_run(jobs, kind, top_n):
            return None
        if kind is MultiStepDrafts.GREEDY:
            return GreedyMultiStep(jobs, num_steps, _go_on)
        return DeviceMultiStep(self._drawing, self._runs, jobs, num_steps, top_n, _go_on)

    def guess(self, jobs: Sequence[Job], logits: StepLogits) -> list[list[int]]:
        """See `Drawing.guess`."""
        return self._drawing.guess(jobs, logits)


def request_of(call: Call) -> ProposeRequest:
    """What a call of this service asks for: it takes nothing else."""
    assert isinstance(call.request, ProposeRequest)
    return call.request


def proposal_of(job: Job) -> Proposal:
    """The answer that a job's draft makes."""
    draft: Draft = job.progress
    last_run_len = job.call.position.committed_len + len(draft.token_ids) - 1  # the last draft token is not run
    return draft.proposal(
        kv_len=min(job.kv_len, last_run_len),
        num_cached_tokens=job.num_cached_tokens,
        forward_s=job.elapsed_s,
        stages=job.stages,
    )


def _go_on(job: Job) -> None:
    """Ends a job whose draft, or score, is complete, or runs its newest token."""
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
    """Whether a draft has all the tokens asked for, or an end token."""
    request, draft = request_of(job.call), job.progress
    return bool(draft.is_complete(request.gamma, request.position.filters))
