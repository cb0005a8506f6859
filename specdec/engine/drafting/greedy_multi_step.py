"""Several greedy draft steps that a worker takes by itself, of tokens that are the likeliest of the model's logits.

What it chose is what one step at a time would have drawn, so a draft only takes its tokens over, up to an end token.
They go back to `engine.loop.steps`. Not here: tokens that are drawn otherwise (`drawing`, `device_run`), when drafts
are run (`run_policy`). Called by the draft service's `drafting`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from specdec.engine.base import StepPlan, Worker
from specdec.engine.drafting.drawing import Draft
from specdec.engine.loop.job import Job


class GreedyMultiStep:
    """Implements `engine.loop.job.MultiStepDraft`."""

    def __init__(self, jobs: Sequence[Job], num_steps: int, go_on: Callable[[Job], None]) -> None:
        """
        Args:
            jobs: those that run, in the order of their rows.
            num_steps: that each of them still wants.
            go_on: ends a job that has got its token, or lets it go on.
        """
        self.num_steps = num_steps
        self._jobs = jobs
        self._go_on = go_on
        self._logits: list[list[float]] = []
        self._token_ids: list[list[int]] = []

    def run_on(self, worker: Worker, plan: StepPlan) -> bool:
        """See `MultiStepDraft.run_on`."""
        logits, token_ids = worker.draft_greedy(plan, self.num_steps)
        self._logits, self._token_ids = logits.tolist(), token_ids.tolist()
        return True

    def take(self, index: int, jobs: Sequence[Job]) -> tuple[list[Job], list[Job]]:
        """See `MultiStepDraft.take`."""
        non_finite, going = [], []
        for job, logit, token_id in zip(self._jobs, self._logits[index], self._token_ids[index], strict=True):
            if job not in jobs:
                continue
            if not math.isfinite(logit):
                non_finite.append(job)
                continue
            job.progress = job.progress or Draft()
            job.progress.token_ids.append(token_id)
            self._go_on(job)
            if job.answer is None:
                going.append(job)
        return non_finite, going
