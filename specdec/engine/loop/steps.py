"""Run one step of the device, from its plan to the use of its logits.

    scheduler: which tokens ─▶ worker: logits ─▶ rows that are finite ─▶ program: a token or an answer a job ─▶ publish

The worker (`specdec.engine.model.model_runner`) runs a round's tokens and returns logits
(`specdec.engine.logits.step_logits`) to the service's program, which answers or appends a token. If a step crashes, its
calls fail and the KV of their sessions is dropped.

Called by `device_loop` on the device thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

from specdec.contract.errors import Internal
from specdec.engine.base import MultiStepDrafts, StepObserver, StepPlan, Worker
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.loop.constraint_masks import ConstraintMasks, rows_without_token
from specdec.engine.loop.delivery import Waiter
from specdec.engine.loop.device_health import DeviceHealth
from specdec.engine.loop.draft_steps import DraftSteps
from specdec.engine.loop.idle_drafting import IdleDrafting
from specdec.engine.loop.inbox import Inbox
from specdec.engine.loop.job import Job, MultiStepDraft, Program, rows_of, slice_of, split_non_finite
from specdec.engine.loop.watchdog import Watchdog, load_of
from specdec.engine.schedule.awaited_sessions import AwaitedSessions
from specdec.engine.schedule.scheduler import Scheduler, StepChunk
from specdec.engine.sessions.calls import Calls
from specdec.engine.sessions.sequence import Sequence

#: Limit on the predicted time of a multi-step draft on a CPU. It saves a tenth of a millisecond a step, but a call that
#: arrives meanwhile waits for all of its steps.
LONGEST_HOST_RUN_S = 0.02

_log = logging.getLogger(__name__)


class StepRunner:
    """The steps of one worker. Every step is watched, timed, and counted as succeeded or failed."""

    def __init__(
        self,
        worker: Worker,
        program: Program,
        calls: Calls[Job, Waiter],
        inbox: Inbox,
        *,
        scheduler: Scheduler,
        masks: ConstraintMasks,
        observer: StepObserver | None,
        clock: Callable[[], float],
        publish: Callable[[Sequence, int], None],
    ) -> None:
        """
        Args:
            worker: runs the forward passes.
            program: turns logits into tokens and answers.
            calls: the running calls.
            inbox: where the device thread sleeps between two steps.
            scheduler: plans the steps and learns their times.
            masks: masks of constrained calls.
            observer: receives every step; None for none.
            clock: clock of the steps.
            publish: receives every sequence with new valid KV, with its committed length.
        """
        self.watchdog = Watchdog(scheduler.predict_step_s, inbox)
        self._worker = worker
        self._program = program
        self._calls = calls
        self._sessions = calls.sessions
        self._scheduler = scheduler
        self._masks = masks
        self._observer = observer
        self._clock = clock
        self._publish = publish
        self._health = DeviceHealth(worker, calls.sessions.blocks)
        self._drafts = DraftSteps(
            worker,
            program,
            self._health,
            self.watchdog,
            masks,
            max_step_tokens=scheduler.max_step_tokens,
            end=calls.end,
            report=self._report,
            clock=clock,
        )

    def run(self, awaited: AwaitedSessions) -> list[Job]:
        """Run one step of the running calls and return its jobs, with or without an answer.

        If some of them draft, it is a draft step, after which only scored jobs may have an answer.

        Args:
            awaited: sessions that may call while the step runs.

        Raises:
            DeviceLost: the step failed, and the device has failed permanently.
        """
        if drafting := self._drafts.choose(self._calls.running):
            self._drafts.run(drafting)
            return drafting
        began_s = self._clock()
        running = self._masks.runnable(job for job in self._calls.running if not job.local_draft)
        if not running:
            self._masks.wait(self._calls.running)
            return []
        for job in running:
            if job.call.run is not None:
                self._calls.make_room(job)
        # A call that arrives while a preemptible call runs must wait for a short step only, so it counts as awaited.
        num_awaited = awaited.count(began_s) + any(job.call.preemptible for job in running[:1])
        chunks = self._scheduler.plan_chunks(running, num_awaited=num_awaited)
        jobs = [running[chunk.job_index] for chunk in chunks]
        try:
            num_steps = self._run_chunks(jobs, chunks, began_s, num_awaited)
        except Exception as error:
            _log.exception("a step of %d sessions failed", len(jobs))
            self._fail([job for job in jobs if job in self._calls.running], error)
            return []
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        self._health.note_step(num_tokens)
        step_s = (self._clock() - began_s) / num_steps
        if num_steps == 1:
            self._scheduler.observe_step(self.watchdog.believed_s(step_s))
        else:
            self._scheduler.observe_run(num_steps, len(chunks), num_steps * self.watchdog.believed_s(step_s))
        self._report(len(chunks), num_tokens, step_s)
        for _ in range(num_steps - 1):
            self._report(len(chunks), len(chunks), step_s)
        return jobs

    def run_ahead(self, ahead: IdleDrafting) -> None:
        """Run one step of branches. If it crashes, all branches end; they wrote to no block that a session owns.

        Raises:
            DeviceLost: the step failed, and the device has failed permanently.
        """
        try:
            began_s = self._clock()
            branches = ahead.next_step(self._sessions)
            if not branches:
                return
            slices = tuple(slice_of(branch.job.sequence, branch.job.num_pending, 1) for branch in branches)
            copies = tuple(branch.block_copy for branch in branches if branch.block_copy is not None)
            self.watchdog.plan = plan = StepPlan(slices, copies)
            logits = self._worker.execute(plan)
            for branch in branches:
                branch.note_run()
            ahead.advance(branches, logits, self._sessions)
            num_tokens = sum(len(part.token_ids) for part in slices)
            self._report(len(slices), num_tokens, self._clock() - began_s)
        except Exception as error:
            _log.exception("drafting ahead of the next calls failed; drafts for them are dropped")
            self._sessions.end_forks()
            self._health.note_failure(error, self.watchdog.plan)

    def _run_chunks(self, jobs: list[Job], chunks: list[StepChunk], began_s: float, num_awaited: int) -> int:
        """Run a planned step, or several as a multi-step draft; return their number."""
        slices = tuple(
            job.next_slice(chunk.num_tokens, chunk.num_logit_rows) for job, chunk in zip(jobs, chunks, strict=True)
        )
        step_tokens = sum(chunk.num_tokens for chunk in chunks)
        for job in jobs:
            job.note_step(began_s, step_tokens)
        self._masks.begin(job for job, chunk in zip(jobs, chunks, strict=True) if chunk.num_tokens == job.num_pending)
        self.watchdog.plan = plan = StepPlan(slices)
        run = self._multi_step_draft(jobs, chunks, plan, num_awaited)
        if run is not None and not run.run_on(self._worker, plan):
            run = None
        logits = self._worker.execute(plan) if run is None else None
        for job, chunk in zip(jobs, chunks, strict=True):
            self._sessions.note_run(job.sequence, chunk.num_tokens)
        ready = [job for job in jobs if not job.num_pending]
        if run is not None:
            ready = self._take_drafts(run, ready)
        elif logits is not None:
            ready, non_finite, read = split_non_finite(ready, logits)
            self._fail_non_finite(non_finite)
            ready, read = self._with_masks(ready, read)
            if ready:
                self._program.advance(ready, read)
        if any(job.answer is None and not job.num_pending for job in ready):
            raise RuntimeError("the program neither finished nor continued a job")
        # Last, and only for jobs whose logits were read: before that, the pass may have produced non-finite numbers.
        for job in ready:
            self._publish(job.sequence, job.committed_len)
        return 1 if run is None else run.num_steps

    def _multi_step_draft(
        self, jobs: list[Job], chunks: list[StepChunk], plan: StepPlan, num_awaited: int
    ) -> MultiStepDraft | None:
        """Return a multi-step draft for these jobs; None if other calls wait, or will, for the first step."""
        kind = self._worker.multi_step_drafts
        if kind is MultiStepDrafts.NONE or len(jobs) < len(self._calls.running) or len(jobs) < num_awaited:
            return None
        for job, chunk in zip(jobs, chunks, strict=True):
            if chunk.num_tokens < job.num_pending or chunk.num_logit_rows != 1 or job.call.constraint is not None:
                return None
        first = load_of(plan)
        if kind is MultiStepDrafts.GREEDY and first.num_prefill_tokens:
            return None  # it gains nothing, and would hide the time of prefill from the scheduler
        run = self._program.multi_step_draft(jobs, kind)
        if run is None or kind is MultiStepDrafts.ANY:
            return run
        further = first._replace(num_tokens=len(jobs))
        run_s = self._scheduler.predict_step_s(first)
        run_s += (run.num_steps - 1) * self._scheduler.predict_step_s(further)
        return run if run_s <= LONGEST_HOST_RUN_S else None

    def _take_drafts(self, run: MultiStepDraft, jobs: list[Job]) -> list[Job]:
        """Give jobs their tokens of a multi-step draft; return the jobs with finite logits."""
        going: Many[Job] = jobs
        failed: list[Job] = []
        for index in range(run.num_steps):
            for job in going if index else ():
                job.sequence.kv_len += 1
            non_finite, going = run.take(index, going)
            self._fail_non_finite(non_finite)
            failed += non_finite
        return [job for job in jobs if job not in failed]

    def _with_masks(self, jobs: list[Job], logits: StepLogits) -> tuple[list[Job], StepLogits]:
        """Return the jobs whose masks are ready, with their rows. The others miss the step, or end."""
        if all(job.masks is None for job in jobs):
            return jobs, logits
        ready, late, failed = self._masks.collect(jobs)
        logits = rows_of(jobs, ready, logits)
        without_token = [] if self._program.masks_own_rows else rows_without_token(ready, logits)
        for job in late:
            job.miss_step()
        for job, error in [*failed, *without_token]:
            self._calls.end(job, error)
        ended = {job for job, _ in without_token}
        going = [job for job in ready if job not in ended]
        return going, rows_of(ready, going, logits)

    def _fail_non_finite(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.call.context.run(_log.error, "non-finite logits: session=%s", job.sequence.session_id)
            self._calls.fail(job, Internal("the model produced non-finite logits; the session's KV was dropped"))

    def _fail(self, jobs: list[Job], error: Exception) -> None:
        for job in jobs:
            self._sessions.invalidate(job.sequence)  # frees blocks for the probe of the device
        self._health.note_failure(error, self.watchdog.plan)
        for job in jobs:
            job.call.context.run(_log.error, "the forward pass of a call failed")
            self._calls.end(job, Internal("the forward pass failed; the session's KV was dropped"))

    def _report(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        if self._observer is not None:
            self._observer.observe_step(num_sequences=num_sequences, num_tokens=num_tokens, seconds=seconds)
