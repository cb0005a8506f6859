"""Draft steps: calls that draft with their own worker take one token a step until they have a draft.

    running ─▶ only the last committed token pending? ─ no ─▶ no draft: verified as it is
                     │ yes
                     ▼
               draft steps, those of all calls together ─▶ end_draft ─▶ a full step verifies, with everybody else

They come before full steps, so that whoever drafts is verified in one full step together, but only so many in a row
while others wait. A draft step writes nothing that its session's sequence counts as KV: a call that ends early, or
fails, leaves its session as it was. Whatever goes wrong costs the draft and never the call. With its draft a call goes
on to a full step (`steps`).

Not here: what is drawn (`specdec.engine.drafting`, through the service's program), full steps (`steps`, which alone
calls this, on the device thread).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from specdec.engine.base import StepPlan, Worker
from specdec.engine.loop.device_health import DeviceHealth
from specdec.engine.loop.job import Job, Program, draft_slice_of, split_non_finite
from specdec.engine.loop.watchdog import Watchdog

#: Draft steps between two full steps for which a call waits: as many as a long draft takes.
MOST_IN_A_ROW = 16

_log = logging.getLogger(__name__)


class DraftSteps:
    """Runs the draft steps of one worker."""

    def __init__(
        self,
        worker: Worker,
        program: Program,
        health: DeviceHealth,
        watchdog: Watchdog,
        *,
        max_step_tokens: int,
        report: Callable[[int, int, float], None],
        clock: Callable[[], float],
    ) -> None:
        """`report` is told of every step: sequences, tokens, seconds."""
        self._worker = worker
        self._program = program
        self._health = health
        self._watchdog = watchdog
        self._max_step_tokens = max_step_tokens
        self._report = report
        self._clock = clock
        self._num_in_a_row = 0

    def choose(self, running: Iterable[Job]) -> list[Job]:
        """The jobs of the next draft step, all of one local draft; none where a full step's turn has come."""
        waits, drafting = False, []
        for job in running:
            if job.local_draft and job.progress is None and job.num_pending > 1:
                job.end_draft()  # what it drafts from is not here yet
            if job.local_draft:
                drafting.append(job)
            else:
                waits = True
        if not drafting or (waits and self._num_in_a_row >= MOST_IN_A_ROW):
            self._num_in_a_row = 0
            return []
        self._num_in_a_row += 1
        return [job for job in drafting if job.local_draft == drafting[0].local_draft][: self._max_step_tokens]

    def run(self, jobs: list[Job]) -> None:
        """Runs one draft step of what `choose` gave.

        Raises:
            DeviceLost: the step failed, and the device for good.
        """
        began_s = self._clock()
        try:
            for job in jobs:
                job.begin_draft()
            plan = StepPlan(tuple(draft_slice_of(job) for job in jobs), local_draft=jobs[0].local_draft)
            self._watchdog.plan = plan
            kept, non_finite, read = split_non_finite(jobs, self._worker.execute(plan))
            for job in non_finite:
                _log.error("a local draft gave no finite logits for session %s", job.sequence.session_id)
                job.end_draft()
            if kept:
                self._program.draft(kept, read)
            self._report(len(jobs), len(jobs), self._clock() - began_s)
        except Exception as error:
            _log.exception("a draft step of %d sessions failed", len(jobs))
            for job in jobs:
                job.end_draft()
            self._health.note_failure(error, self._watchdog.plan)
