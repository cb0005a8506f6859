"""When the next tokens of drafts are drawn in a run of steps.

Where a law reaches further than a run looks, the steps that the run made beyond it were for nothing; after such a run
the next drafts are drawn one step at a time, the more of them the oftener that happens. Not here: the run
(`device_run`). Called by the draft service's `drafting`.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.engine.base import MultiStepDrafts
from specdec.engine.drafting.drawing import context_of
from specdec.engine.logits.filters import MAX_BATCH_LOGITS
from specdec.engine.logits.rows import FIRST_CANDIDATES
from specdec.engine.loop.job import Job, RowKind, row_kind

#: Most opportunities for a run that are let pass after one whose laws reached too far.
MAX_PAUSE = 255


class MultiStepPolicy:
    """When drafts are run. Device thread only."""

    def __init__(self, *, s_max: int, num_tokens: int) -> None:
        """`s_max`: most entries of a support; `num_tokens`: V."""
        self._s_max = s_max
        self._num_tokens = num_tokens
        self._pause = 0
        self._num_left = 0

    def may_run(self, jobs: Sequence[Job], kind: MultiStepDrafts, top_n: int) -> bool:
        """Whether the next tokens of jobs of rounds that draft are drawn in a run; asked once an opportunity.

        Args:
            jobs: those of the next step.
            kind: which runs the worker has.
            top_n: how many of the likeliest tokens the drafts note.
        """
        if kind is MultiStepDrafts.GREEDY:
            return not top_n and all(_takes_top(job) for job in jobs)
        if len(jobs) * self._num_tokens > MAX_BATCH_LOGITS:
            return False
        if any(job.progress is not None and job.progress.is_wide for job in jobs):
            return False
        if self._num_left and self._may_be_wide(jobs):
            self._num_left -= 1
            return False
        return True

    def note_run(self, jobs: Sequence[Job]) -> None:
        """A run has ended."""
        if self._may_be_wide(jobs):
            is_wide = any(job.progress.is_wide for job in jobs)
            self._pause = min(2 * self._pause + 1, MAX_PAUSE) if is_wide else 0
            self._num_left = self._pause

    def _may_be_wide(self, jobs: Sequence[Job]) -> bool:
        return any(self._may_reach_far(job) for job in jobs)

    def _may_reach_far(self, job: Job) -> bool:
        kind, filters = row_kind(job.call.position), job.call.position.filters
        if kind is RowKind.GREEDY or 0 < filters.top_k <= FIRST_CANDIDATES:
            return False
        is_wide_support = kind is RowKind.DISTRIBUTION and min(self._s_max, self._num_tokens) > FIRST_CANDIDATES
        return is_wide_support or filters.top_p < 1.0


def _takes_top(job: Job) -> bool:
    """Whether its next tokens are those of the highest logits, as the model gives them."""
    return row_kind(job.call.position) is RowKind.GREEDY and not context_of(job).changes_logits
