"""Draft steps: calls with a local draft draft one token a step on their own worker until the draft is complete.

    running ─▶ only the last committed token pending? ─ no ─▶ no draft: verified as it is
                     │ yes
                     ▼
               draft steps of all calls together ─▶ end_draft ─▶ a full step verifies all calls

Draft steps run before full steps, so that drafting calls are verified together in one full step; their number in a row
is limited while other calls wait. A draft step writes nothing that its session's sequence counts as KV, so a call that
ends early or fails leaves its session unchanged. A failure costs the draft and never the call. With its draft a call
continues in a full step (`steps`).

Drafts of a constrained call are drawn from the tokens that the constraint allows. If the masks are late, the call
repeats the draft step once they are ready: a draft that went on without them would change the text of a seed.

`specdec.engine.drafting` samples the tokens, through the service's program. Called by `steps` on the device thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from specdec.contract.errors import SpecdecError
from specdec.engine.base import StepPlan, Worker
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.loop.constraint_masks import ConstraintMasks, rows_without_token
from specdec.engine.loop.device_health import DeviceHealth
from specdec.engine.loop.job import Job, Program, draft_slice_of, rows_of, split_non_finite
from specdec.engine.loop.watchdog import Watchdog

#: Limit on draft steps between two full steps while a call waits: the length of a long draft.
MOST_IN_A_ROW = 16

_log = logging.getLogger(__name__)


class DraftSteps:
    """The draft steps of one worker."""

    def __init__(
        self,
        worker: Worker,
        program: Program,
        health: DeviceHealth,
        watchdog: Watchdog,
        masks: ConstraintMasks,
        *,
        max_step_tokens: int,
        end: Callable[[Job, SpecdecError], None],
        report: Callable[[int, int, float], None],
        clock: Callable[[], float],
    ) -> None:
        """`end` ends a call with an error. `report` receives the sequences, tokens and seconds of every step. The
        others are the loop's."""
        self._worker = worker
        self._program = program
        self._health = health
        self._watchdog = watchdog
        self._masks = masks
        self._end = end
        self._max_step_tokens = max_step_tokens
        self._report = report
        self._clock = clock
        self._num_in_a_row = 0

    def choose(self, running: Iterable[Job]) -> list[Job]:
        """Return the jobs of the next draft step, all of one local draft; none if a full step is due, or if all of them
        wait for masks."""
        waits, drafting = False, []
        for job in running:
            if job.local_draft and job.progress is None and job.num_pending > 1:
                job.end_draft()  # the tokens that it drafts from have no KV yet
            if job.local_draft:
                drafting.append(job)
            else:
                waits = True
        drafting = self._masks.runnable(drafting)
        if not drafting or (waits and self._num_in_a_row >= MOST_IN_A_ROW):
            self._num_in_a_row = 0
            return []
        self._num_in_a_row += 1
        return [job for job in drafting if job.local_draft == drafting[0].local_draft][: self._max_step_tokens]

    def run(self, jobs: list[Job]) -> None:
        """Run one draft step of the jobs that `choose` returned.

        Raises:
            DeviceLost: the step failed, and the device has failed permanently.
        """
        began_s = self._clock()
        try:
            for job in jobs:
                job.begin_draft()
            plan = StepPlan(tuple(draft_slice_of(job) for job in jobs), local_draft=jobs[0].local_draft)
            self._watchdog.plan = plan
            self._masks.begin(jobs)
            kept, non_finite, read = split_non_finite(jobs, self._worker.execute(plan))
            for job in non_finite:
                words = "non-finite logits of a local draft: session=%s"
                job.call.context.run(_log.error, words, job.sequence.session_id)
                job.end_draft()
            kept, read = self._with_masks(kept, read)
            if kept:
                self._program.draft(kept, read)
            self._report(len(jobs), len(jobs), self._clock() - began_s)
        except Exception as error:
            _log.exception("a draft step of %d sessions failed", len(jobs))
            for job in jobs:
                job.end_draft()
            self._health.note_failure(error, self._watchdog.plan)

    def _with_masks(self, jobs: list[Job], logits: StepLogits) -> tuple[list[Job], StepLogits]:
        """Return the jobs whose masks are ready, with their rows.

        The draft of a job ends if its head has none of the legal tokens. Late jobs repeat the step.
        """
        if all(job.masks is None for job in jobs):
            return jobs, logits
        ready, _, failed = self._masks.collect(jobs)
        logits = rows_of(jobs, ready, logits)
        for job, error in failed:
            self._end(job, error)
        without_token = {job for job, _ in rows_without_token(ready, logits)}
        going = [job for job in ready if job not in without_token]
        logits = rows_of(ready, going, logits)
        for job in without_token:
            job.end_draft()
        return going, logits
