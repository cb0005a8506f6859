"""Decision whether the next draft tokens are drawn in one multi-step draft.

A multi-step draft considers a limited number of candidates. If a distribution needs more, the steps after it are
wasted. After such a draft the policy pauses: the next drafts take one step at a time, and each repetition doubles the
pause. Called by the draft service's `drafting`.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.engine.base import MultiStepDrafts
from specdec.engine.drafting.drawing import context_of
from specdec.engine.logits.filters import MAX_BATCH_LOGITS
from specdec.engine.logits.rows import FIRST_CANDIDATES
from specdec.engine.loop.job import Job, RowKind, row_kind

#: Maximum number of drafts that take one step at a time after a wasted multi-step draft.
MAX_PAUSE = 255


class MultiStepPolicy:
    """Decides for each draft. Device thread only."""

    def __init__(self, *, s_max: int, num_tokens: int) -> None:
        """`s_max`: maximum number of entries of a support; `num_tokens`: V."""
        self._s_max = s_max
        self._num_tokens = num_tokens
        self._pause = 0
        self._num_left = 0

    def allows(self, jobs: Sequence[Job], kind: MultiStepDrafts, top_n: int) -> bool:
        """Return whether the jobs may draft in multiple steps. Call this once per opportunity: it counts the pause.

        Args:
            jobs: the jobs of the next step.
            kind: the multi-step drafts that the worker supports.
            top_n: number of top tokens that the drafts note.
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

    def note_end(self, jobs: Sequence[Job]) -> None:
        """Note the end of a multi-step draft."""
        if self._may_be_wide(jobs):
            is_wide = any(job.progress.is_wide for job in jobs)
            self._pause = min(2 * self._pause + 1, MAX_PAUSE) if is_wide else 0
            self._num_left = self._pause

    def _may_be_wide(self, jobs: Sequence[Job]) -> bool:
        return any(self._may_need_more_candidates(job) for job in jobs)

    def _may_need_more_candidates(self, job: Job) -> bool:
        kind, filters = row_kind(job.call.position), job.call.position.filters
        if kind is RowKind.GREEDY or 0 < filters.top_k <= FIRST_CANDIDATES:
            return False
        is_wide_support = kind is RowKind.DISTRIBUTION and min(self._s_max, self._num_tokens) > FIRST_CANDIDATES
        return is_wide_support or filters.top_p < 1.0


def _takes_top(job: Job) -> bool:
    """Return whether the job's next tokens are the argmax of unchanged logits."""
    return row_kind(job.call.position) is RowKind.GREEDY and not context_of(job).changes_logits
