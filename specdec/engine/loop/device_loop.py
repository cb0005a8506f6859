"""The device thread: takes calls from asyncio, runs them step by step on a worker, and hands the answers back.

    asyncio loop                          device thread
    call() ── inbox ──────────────────▶  fence, align, reserve ─▶ running ─▶ step ─▶ program.advance
       ▲                                          │ no blocks yet                        │
       └── one callback per turn ◀────────────────┴──── waiting ◀────────────────────────┘

All state below belongs to the device thread. The asyncio side only appends to the inbox under its condition and reads
a few numbers for `load()`. No forward pass ever runs on the event loop, and the thread sleeps when there is nothing to
do. What a service does ahead of its calls (`ahead`) gets the steps in which no call could run, so a call waits for at
most one of them.

While a step is beyond its time (`watchdog`) every call fails at once; once it ends, the loop goes on. A device that
fails for good (`device_health`) ends it.

Not here: what the logits mean (`Program`), which tokens run (`scheduler`), what is here already (`sessions`), how
answers get back (`delivery`). Called by the draft service's proposer and the target service's verifier.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specdec.engine.base import StepObserver, StepPlan, Worker
from specdec.engine.loop.ahead import Ahead, Branch
from specdec.engine.loop.delivery import Outbox, Waiter
from specdec.engine.loop.device_health import DeviceHealth, DeviceLost
from specdec.engine.loop.job import Call, Job, Program, slice_of, split_non_finite
from specdec.engine.loop.watchdog import LOOK_INTERVAL_S, Watchdog
from specdec.engine.schedule.absences import Absences
from specdec.engine.schedule.scheduler import DEFAULT_MAX_STEP_TOKENS, DEFAULT_PREFILL_BUDGET_S, Scheduler, StepChunk
from specdec.engine.sessions.block_manager import BlockManager
from specdec.engine.sessions.sequence import Sequence, StoredAnswer
from specdec.engine.sessions.table import DEFAULT_PIN_TTL_S, SessionTable
from specdec.errors import Internal, KvMiss, ResourceExhausted, SpecdecError, StaleEpoch, Unavailable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Load:
    """How full a replica is."""

    kv_usage: float
    """Share of KV blocks held by sessions, 0..1."""
    num_sessions: int
    """Sessions with KV."""
    draining: bool
    """Whether it refuses calls: it is closing, or its device is stalled."""


class EngineLoop:
    """Runs one program on one worker. Build it anywhere; call it from asyncio; close it when done."""

    def __init__(
        self,
        worker: Worker,
        program: Program,
        *,
        max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS,
        prefill_budget_s: float = DEFAULT_PREFILL_BUDGET_S,
        pin_ttl_s: float = DEFAULT_PIN_TTL_S,
        clock: Callable[[], float] = time.monotonic,
        ahead: Ahead | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        """Starts the thread. `ahead` is what the service does while no call runs; None: nothing.

        `observer` is told of every step, branches' too; steps are timed by `clock`.
        """
        self._worker = worker
        self._program = program
        self._ahead = ahead or Ahead()
        self._clock = clock
        self._observer = observer
        self._blocks = BlockManager(worker.shape.num_kv_blocks)
        self._sessions = SessionTable(self._blocks, pin_ttl_s=pin_ttl_s, clock=clock)
        self._scheduler = Scheduler(max_step_tokens, prefill_budget_s)
        self._absences = Absences()
        self._jobs: dict[str, Job] = {}  # by session id: running and waiting
        self._waiters: dict[Job, list[Waiter]] = {}
        self._running: list[Job] = []  # in order of arrival
        self._waiting: deque[Job] = deque()  # for KV blocks
        self._pin_end_s: float | None = None  # while nothing but pins keeps the waiting ones from running
        self._outbox = Outbox()
        self._health = DeviceHealth(worker, self._blocks)
        self._watchdog = Watchdog(self._scheduler.predict_step_s)

        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []  # guarded by _wake
        self._closing = False  # guarded by _wake
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended.set_running_or_notify_cancel()  # whoever stops awaiting it does not cancel it
        self._thread = threading.Thread(target=self._run, name="specdec-device", daemon=True)
        self._thread.start()

    async def call(self, call: Call) -> Any:
        """Runs a call to its answer.

        The same (session, epoch, round) and digest join the call in flight or get its stored answer. Cancelling
        abandons the call: nothing is answered, the KV that was computed stays.

        Raises:
            KvMiss, StaleEpoch, ResourceExhausted, Unavailable: as `DraftEngine.propose` says. A call that fails because
                the device is stalled is abandoned as if it were cancelled.
            Internal: the step crashed; the session's KV is gone.
        """
        waiter = Waiter()
        with self._wake:
            if self._closing:
                raise Unavailable("this replica is draining", reason="DRAINING")
            self._watchdog.require_moving()
            self._post(functools.partial(self._admit, call, waiter, self._clock()))
        try:
            return await self._watchdog.answer_to(waiter)
        except (asyncio.CancelledError, Unavailable):
            with self._wake:
                self._post(functools.partial(self._abandon, call.position.session_id, waiter))
            raise

    async def release(self, session_ids: list[str]) -> None:
        """Forgets sessions and frees their KV; calls in flight on them miss. Returns when it is done.

        Raises:
            Unavailable: the device is stalled; it is done once that goes on.
        """
        waiter = Waiter()
        with self._wake:
            if self._closing:
                return  # closing frees everything
            self._post(functools.partial(self._release, tuple(session_ids), waiter))
        await self._watchdog.answer_to(waiter)

    async def close(self) -> None:
        """Refuses new calls, finishes those in flight, frees everything, ends the thread. Idempotent.

        A thread whose device is stalled is left behind: nothing can end it but the process.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._join)

    @property
    def is_stalled(self) -> bool:
        """Whether the step that runs is far beyond its time; nothing is answered until it ends."""
        return self._watchdog.is_stalled

    async def wait_ended(self) -> None:
        """Returns once the device thread has ended because of `close`.

        Raises:
            Internal: the thread broke down, or the device failed for good; nothing will be answered any more.
        """
        await asyncio.wrap_future(self._ended)

    def load(self) -> Load:
        return Load(
            kv_usage=self._blocks.num_held / self._blocks.num_blocks,
            num_sessions=self._sessions.num_with_kv,
            draining=self._closing or self._watchdog.is_stalled,
        )

    def kv_len(self, session_id: str) -> int:
        """Tokens of a session that have KV here now; 0 for an unknown one."""
        sequence = self._sessions.get(session_id)
        return 0 if sequence is None else sequence.kv_len

    def check_integrity(self) -> None:
        """Checks the books, between two steps; only while no call is in flight, or after `close`.

        Raises:
            RuntimeError: a block is owned otherwise than counted.
        """
        checked: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._wake:
            is_open = not self._closing
            if is_open:
                self._post(functools.partial(self._check, checked))
        if is_open:
            checked.result()
        else:
            self._sessions.check_integrity()

    def _post(self, command: Callable[[], None]) -> None:
        """Gives the device thread something to do; `_wake` is held."""
        self._inbox.append(command)
        self._wake.notify()

    def _join(self) -> None:
        while self._thread.is_alive() and not self._watchdog.is_stalled:
            self._thread.join(LOOK_INTERVAL_S)

    # Everything below runs on the device thread.

    def _run(self) -> None:
        outcome: SpecdecError = Internal("the engine's thread ended")
        try:
            try:
                self._run_turns()
            except DeviceLost as lost:
                outcome = Unavailable(f"{lost.message}; the replica ends")
                raise
            finally:
                self._watchdog.end()
                self._end(outcome)
        except DeviceLost as lost:
            _log.critical("%s", lost.message)
            self._ended.set_exception(lost)
        except BaseException as error:
            _log.critical("the device thread broke down", exc_info=True)
            self._ended.set_exception(Internal(f"the engine's device thread broke down: {error!r}"))
        else:
            self._ended.set_result(None)

    def _run_turns(self) -> None:
        with torch.inference_mode():
            while (commands := self._next_commands()) is not None:
                for command in commands:
                    command()
                self._start_waiting()
                if self._running:
                    self._step()
                elif self._outbox.is_empty:  # answers leave first
                    self._step_ahead()
                self._watchdog.plan = None
                self._outbox.deliver()

    def _end(self, outcome: SpecdecError) -> None:
        """The thread's last act; jobs are left only when a fault ends it: they get `outcome`, and nobody may wait for
        ever.
        """
        with self._wake:
            self._closing = True
            commands, self._inbox = self._inbox, []
        for command in commands:
            command()
        for job in list(self._jobs.values()):
            self._remove(job, outcome)
        self._outbox.deliver()
        self._sessions.release_all()

    def _next_commands(self) -> list[Callable[[], None]] | None:
        """Commands to carry out, sleeping while there is nothing to do; None when closed and drained."""
        with self._wake:
            while not self._inbox and (not self._jobs or self._pin_end_s is not None):
                if self._closing and not self._jobs:
                    return None
                if self._ahead.has_work():
                    break
                left_s = None if self._pin_end_s is None else self._pin_end_s - self._clock()
                if left_s is not None and left_s <= 0:
                    break
                self._wake.wait(left_s)
            commands, self._inbox = self._inbox, []
            return commands

    def _check(self, checked: concurrent.futures.Future[None]) -> None:
        try:
            self._sessions.check_integrity()
        except RuntimeError as error:
            checked.set_exception(error)
        else:
            checked.set_result(None)

    def _admit(self, call: Call, waiter: Waiter, arrival_s: float) -> None:
        if waiter.future.done():  # cancelled, or told that the device is stalled
            return
        sequence: Sequence | None = None
        try:
            sequence = self._sessions.fence(call.position)
            self._admit_fenced(call, waiter, arrival_s, sequence)
        except SpecdecError as error:
            self._outbox.put(waiter, error)
        except Exception:
            _log.exception("admission failed")
            failure = Internal("the engine failed to admit the call")
            job = self._jobs.get(call.position.session_id)
            if job is not None:
                self._remove(job, failure)
            if sequence is not None:
                self._sessions.invalidate(sequence)
            self._outbox.put(waiter, failure)

    def _admit_fenced(self, call: Call, waiter: Waiter, arrival_s: float, sequence: Sequence) -> None:
        job = self._jobs.get(sequence.session_id)
        if (call.position.epoch, call.position.round_id) == (sequence.epoch, sequence.newest_round):
            if job is not None and job.call.digest == call.digest:
                self._waiters[job].append(waiter)
                return
            if job is None and sequence.answer is not None and sequence.answer.digest == call.digest:
                self._outbox.put(waiter, sequence.answer.value)
                return
        if job is not None:
            self._remove(job, StaleEpoch(f"superseded by a newer call of session {sequence.session_id}"))
        knows_start = self._sessions.knows_start(sequence, call.position)
        branch = self._ahead.take(sequence, call) if knows_start else None
        if branch is None:
            self._sessions.align(sequence, call.position, call.draft_token_ids)
        else:
            self._sessions.adopt_fork(sequence, call.position, branch.job.sequence)
        job = Job(call, sequence, arrival_step=self._scheduler.num_steps, arrival_s=arrival_s, clock=self._clock)
        self._jobs[sequence.session_id] = job
        self._absences.note_back(sequence.session_id)
        self._waiters[job] = [waiter]
        self._waiting.append(job)
        if branch is not None:
            self._resume(job, branch)

    def _resume(self, job: Job, branch: Branch) -> None:
        """Goes on from a branch that assumed the job's call; often it is answered by that."""
        committed_len = job.call.position.committed_len
        job.num_cached_tokens = committed_len
        self._ahead.resume(job, branch)
        self._sessions.publish(job.sequence, committed_len)
        if job.answer is not None:
            self._finish(job)

    def _start_waiting(self) -> None:
        """Lets jobs run in order of arrival as far as KV blocks go."""
        self._pin_end_s = None
        while self._waiting:
            job = self._waiting[0]
            try:
                if not self._reserve(job):
                    self._pin_end_s = None if self._running else self._sessions.next_pin_end_s()
                    if self._running or self._pin_end_s is not None:
                        return
                    raise ResourceExhausted("no KV block is left on this replica", reason="KV_EXHAUSTED")
            except ResourceExhausted as error:
                self._remove(job, error)
            else:
                job.num_cached_tokens = min(job.kv_len, job.call.position.committed_len)
                self._running.append(self._waiting.popleft())

    def _reserve(self, job: Job) -> bool:
        # While something runs, blocks will come back by themselves.
        behind = () if self._running else [other.sequence for other in reversed(self._waiting)]
        return self._sessions.reserve(
            job.sequence,
            committed_len=job.call.position.committed_len,
            max_kv_len=job.call.max_kv_len,
            preemptable=behind,
        )

    def _step(self) -> None:
        """Runs one step; if it crashes, its jobs fail and whatever KV they had is not trusted any more."""
        began_s = self._clock()
        chunks = self._scheduler.plan_chunks(self._running, num_absent=self._absences.count(began_s))
        jobs = [self._running[chunk.job_index] for chunk in chunks]
        try:
            self._run_chunks(jobs, chunks, began_s)
        except Exception as error:
            _log.exception("a step of %d sessions failed", len(jobs))
            failed = [job for job in jobs if job in self._running]
            for job in failed:
                self._sessions.invalidate(job.sequence)
            self._health.note_failure(error)
            for job in failed:
                self._remove(job, Internal("the forward pass failed; the session's KV was dropped"))
            return
        self._health.note_step()
        step_s = self._clock() - began_s
        self._scheduler.observe_step(self._watchdog.believed_s(step_s))
        self._report(len(chunks), sum(chunk.num_tokens for chunk in chunks), step_s)
        for job in jobs:
            if job.answer is not None:
                self._finish(job)

    def _report(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        if self._observer is not None:
            self._observer.observe_step(num_sequences=num_sequences, num_tokens=num_tokens, seconds=seconds)

    def _step_ahead(self) -> None:
        """Runs one step of branches. If it crashes they all end: they wrote to no block that a session owns."""
        try:
            began_s = self._clock()
            branches = self._ahead.next_step(self._sessions)
            if not branches:
                return
            slices = tuple(slice_of(branch.job.sequence, branch.job.num_pending, 1) for branch in branches)
            copies = tuple(branch.block_copy for branch in branches if branch.block_copy is not None)
            self._watchdog.plan = plan = StepPlan(slices, copies)
            logits = self._worker.execute(plan)
            for branch in branches:
                branch.note_run()
            self._ahead.advance(branches, logits, self._sessions)
            num_tokens = sum(len(part.token_ids) for part in slices)
            self._report(len(slices), num_tokens, self._clock() - began_s)
        except Exception as error:
            _log.exception("a step of branches failed")
            self._sessions.end_forks()
            self._health.note_failure(error)

    def _run_chunks(self, jobs: list[Job], chunks: list[StepChunk], began_s: float) -> None:
        slices = tuple(
            slice_of(job.sequence, chunk.num_tokens, chunk.num_logit_rows)
            for job, chunk in zip(jobs, chunks, strict=True)
        )
        self._watchdog.plan = plan = StepPlan(slices)
        logits = self._worker.execute(plan)
        if logits.is_cuda and not len(logits):
            # Nothing of the step will be read back: unless waited for, it would be timed, and delay calls, with the
            # next one.
            torch.cuda.synchronize(logits.device)
        step_tokens = sum(chunk.num_tokens for chunk in chunks)
        for job, chunk in zip(jobs, chunks, strict=True):
            job.sequence.kv_len += chunk.num_tokens
            job.step_began_s, job.step_tokens = began_s, step_tokens
        ready, non_finite, read = split_non_finite([job for job in jobs if not job.num_pending], logits)
        for job in non_finite:
            _log.error("the model gave no finite logits for session %s", job.sequence.session_id)
            self._fail(job, "the model gave no finite logits; the session's KV was dropped")
        if ready:
            self._program.advance(ready, read)
        if any(job.answer is None and not job.num_pending for job in ready):
            raise RuntimeError("the program neither finished a job nor went on with it")
        # Last, and not after a chunk that asked for no logits: until they are read nobody knows that a pass was good.
        for job in ready:
            self._sessions.publish(job.sequence, job.call.position.committed_len)

    def _finish(self, job: Job) -> None:
        """Stores a job's answer and sends it."""
        self._sessions.store_answer(job.sequence, StoredAnswer(job.call.digest, job.answer))
        self._remove(job, job.answer)
        self._absences.note_answered(job.sequence.session_id, self._clock())
        self._ahead.note_answered(job)

    def _fail(self, job: Job, reason: str) -> None:
        """Ends a job whose KV is not to be trusted."""
        self._sessions.invalidate(job.sequence)
        self._remove(job, Internal(reason))

    def _remove(self, job: Job, outcome: Any) -> None:
        """Takes a job out of the engine; `outcome`, an answer or an error, goes to everyone who waits for it."""
        del self._jobs[job.sequence.session_id]
        (self._running if job in self._running else self._waiting).remove(job)
        for waiter in self._waiters.pop(job):
            self._outbox.put(waiter, outcome)
        self._sessions.settle(job.sequence)

    def _abandon(self, session_id: str, waiter: Waiter) -> None:
        """A caller went away: the job goes too unless someone else waits for it."""
        job = self._jobs.get(session_id)
        if job is None or waiter not in self._waiters[job]:
            return
        self._waiters[job].remove(waiter)
        if not self._waiters[job]:
            self._remove(job, None)

    def _release(self, session_ids: tuple[str, ...], waiter: Waiter) -> None:
        for session_id in session_ids:
            job = self._jobs.get(session_id)
            if job is not None:
                # Not stale: the session may have been made anew while the release was under way.
                self._remove(job, KvMiss(f"session {session_id} was released; send from 0 on", have=0))
            self._sessions.release(session_id)
            self._absences.note_back(session_id)
        self._outbox.put(waiter, None)
