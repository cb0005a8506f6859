"""The device thread: take calls from asyncio, run them step by step on a worker, and return the answers.

    asyncio loop                          device thread
    call() ── inbox ──────────────────▶  admit, align, reserve ─▶ running ─▶ step ─▶ program.advance
       ▲                                          │ no blocks yet                        │
       └── one callback per turn ◀── outbox ◀─────┴──── waiting ◀────────────────────────┘

The proposer or the verifier makes a call. `specdec.engine.loop.call_desk` admits it: it passes
`specdec.engine.sessions.calls` (is it new?) and `specdec.engine.sessions.table` (which tokens have KV?). It runs in
`specdec.engine.loop.steps`, and its answer leaves through `specdec.engine.loop.delivery`.

All state below belongs to the device thread. The asyncio side only posts to the inbox and reads a few numbers for
`load()`. No forward pass runs on the event loop, and the thread sleeps while there is nothing to do. Idle drafting gets
the steps in which no call can run, so a call waits for at most one of them.

While a step, or the work between two steps, exceeds its time limit (`watchdog`), every call fails at once; the loop
continues when it ends. The loop ends when the device fails permanently (`device_health`) or when the worker loses a
rank.

`Program` interprets the logits, and `scheduler` chooses the tokens of a step.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from specdec.contract.engine_api import EndedTurn, EngineStats
from specdec.contract.errors import Internal, SpecdecError, Unavailable
from specdec.contract.types import SessionPosition
from specdec.engine.base import StepObserver, Worker, WorkerLost
from specdec.engine.cold_tier import ColdTier
from specdec.engine.loop.call_desk import CallDesk
from specdec.engine.loop.constraint_masks import ConstraintMasks
from specdec.engine.loop.delivery import Outbox, Waiter
from specdec.engine.loop.device_health import DeviceLost
from specdec.engine.loop.idle_drafting import IdleDrafting
from specdec.engine.loop.inbox import Inbox
from specdec.engine.loop.job import Job, Program
from specdec.engine.loop.loop_stats import Load, read_stats
from specdec.engine.loop.preemptible_calls import PreemptibleCalls
from specdec.engine.loop.steps import StepRunner
from specdec.engine.loop.tier_transfer import TierRestorer, TierWriter
from specdec.engine.loop.watchdog import LOOK_INTERVAL_S
from specdec.engine.schedule.awaited_sessions import AwaitedSessions
from specdec.engine.schedule.scheduler import DEFAULT_MAX_STEP_TOKENS, DEFAULT_PREFILL_BUDGET_S, Scheduler
from specdec.engine.sessions.block_manager import BlockManager
from specdec.engine.sessions.calls import DEFAULT_LIMITS, Call, Calls
from specdec.engine.sessions.kv_queue import WaitLimits
from specdec.engine.sessions.table import DEFAULT_PIN_TTL_S, SessionTable

#: Time limit of the work between two steps, such as copies of KV blocks.
NO_STEP_PATIENCE_S = 10.0

_log = logging.getLogger(__name__)


class EngineLoop:
    """One program on one worker. It may be built in any thread, is called from asyncio, and must be closed."""

    def __init__(
        self,
        worker: Worker,
        program: Program,
        *,
        max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS,
        prefill_budget_s: float = DEFAULT_PREFILL_BUDGET_S,
        pin_ttl_s: float = DEFAULT_PIN_TTL_S,
        clock: Callable[[], float] = time.monotonic,
        ahead: IdleDrafting | None = None,
        observer: StepObserver | None = None,
        tier: ColdTier | None = None,
        limits: WaitLimits = DEFAULT_LIMITS,
        masks: ConstraintMasks | None = None,
    ) -> None:
        """Start the thread.

        Args:
            worker: runs the steps.
            program: turns logits into tokens and answers.
            max_step_tokens: token budget of a step.
            prefill_budget_s: time that prefill may add to a step.
            pin_ttl_s: time for which a miss pins its session's blocks.
            clock: clock of steps and pins.
            ahead: drafting while no call runs; None for none.
            observer: receives every step, also those of branches.
            tier: cold tier that receives runs of KV blocks and restores those that a call lacks; None for none.
            limits: bounds on the calls that wait for KV blocks.
            masks: masks of constrained calls; None if there are none.
        """
        self._idle_drafting = ahead or IdleDrafting()
        self._clock = clock
        self._blocks = BlockManager(worker.shape.num_kv_blocks)
        states = BlockManager(worker.shape.num_states, worker.shape.state_bytes) if worker.shape.num_states else None
        self._sessions = SessionTable(self._blocks, states, pin_ttl_s=pin_ttl_s, clock=clock)
        self._masks = masks or ConstraintMasks(program)
        self._inbox = Inbox()
        self._outbox = Outbox()
        self._calls: Calls[Job, Waiter] = Calls(self._sessions, self._outbox.put, limits, self._outbox.put_step)
        self._scheduler = Scheduler(max_step_tokens, prefill_budget_s)
        self._awaited = AwaitedSessions()
        self._arrived: set[Waiter] = set()
        """Waiters of calls that the device thread has not admitted yet."""
        self._preemptible_calls = PreemptibleCalls(self._calls)
        publish = self._sessions.publish
        self._tier_restorer: TierRestorer | None = None
        if tier is not None:
            tier = worker.divided(tier)
            publish = TierWriter(tier, worker, self._sessions).publish
            self._tier_restorer = TierRestorer(
                tier, worker, self._calls, scheduler=self._scheduler, inbox=self._inbox, clock=clock
            )
        self._steps = StepRunner(
            worker,
            program,
            self._calls,
            self._inbox,
            scheduler=self._scheduler,
            masks=self._masks,
            observer=observer,
            clock=clock,
            publish=publish,
        )
        self._desk = CallDesk(
            self._calls,
            self._outbox,
            self._scheduler,
            self._awaited,
            self._idle_drafting,
            self._preemptible_calls,
            publish,
            observer,
            limits.max_wait_s,
            clock,
        )
        self._watchdog = self._steps.watchdog
        self._wakes_at_s = 0.0
        """End of the wait of pending calls, as the device thread knew it when it last went to sleep."""
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended.set_running_or_notify_cancel()  # a waiter that stops awaiting it must not cancel it
        self._worker = worker
        worker.watch(self._note_lost)
        self._thread = threading.Thread(target=self._run, name="specdec-device", daemon=True)
        self._thread.start()

    async def call(self, call: Call, on_step: Callable[[Any], None] | None = None) -> Any:
        """Run a call and return its answer; `on_step` takes the answers of a run's steps before the last one.

        A call with the same (session, epoch, round) and digest joins the running one or gets its stored answer.
        Cancelling abandons the call: nothing is answered, and the computed KV stays.

        Raises:
            KvMiss, StaleEpoch, ResourceExhausted, Unavailable: as in `DraftEngine.propose`. A call that fails because
                the device is stalled is abandoned as if it were cancelled.
            Internal: the step crashed; the session's KV is gone.
        """
        waiter = Waiter(on_step)
        if not self._inbox.is_closed:
            self._watchdog.require_moving()
        if not call.preemptible:
            self._arrived.add(waiter)
        if not self._inbox.post(functools.partial(self._admit, call, waiter, self._clock())):
            self._arrived.discard(waiter)
            raise Unavailable("this replica is draining", reason="DRAINING")
        try:
            return await self._watchdog.answer_to(waiter)
        except (asyncio.CancelledError, Unavailable):
            abandon = functools.partial(self._calls.abandon, call.position.session_id, waiter)
            self._inbox.post(abandon, even_closed=True)
            raise
        finally:
            if call.preemptible and not call.keeps_session:
                self._inbox.post(functools.partial(self._calls.release, call.position.session_id), even_closed=True)

    def renew(self, position: SessionPosition, until: int, committed_len: int) -> None:
        """Raise the limit of a run; see `TargetEngine.renew`."""
        self._inbox.post(functools.partial(self._renew, position, until, committed_len))

    async def release(self, session_ids: list[str]) -> None:
        """Forget sessions and free their KV; their running calls end with KvMiss. Return when it is done.

        Raises:
            Unavailable: the device is stalled; the sessions are released once it continues.
        """
        waiter = Waiter()
        if self._inbox.post(functools.partial(self._desk.release, tuple(session_ids), waiter)):
            await self._watchdog.answer_to(waiter)  # otherwise closing frees everything

    async def end_turns(self, turns: list[EndedTurn]) -> None:
        """End turns: abandon their calls and give back the blocks that are reserved for them. Return when it is done.

        Raises:
            Unavailable: the device is stalled; the turns end once it continues.
        """
        waiter = Waiter()
        if self._inbox.post(functools.partial(self._desk.end_turns, tuple(turns), waiter)):
            await self._watchdog.answer_to(waiter)  # otherwise closing frees everything

    async def close(self) -> None:
        """Refuse new calls, finish the running ones, free all KV and end the thread. Idempotent.

        A thread whose device is stalled is left behind, because only the end of the process can end it.
        """
        self._inbox.close()
        await asyncio.to_thread(self._join)

    @property
    def is_stalled(self) -> bool:
        """True while the running step far exceeds its time limit; nothing is answered until it ends."""
        return self._watchdog.is_stalled

    async def wait_ended(self) -> None:
        """Return once the device thread has ended because of `close`.

        Raises:
            Internal: the thread broke down, or the device failed permanently. No call will be answered.
        """
        await asyncio.wrap_future(self._ended)

    def load(self) -> Load:
        """Return the current load; any thread may call this."""
        return Load(
            kv_usage=self._sessions.num_active_blocks / self._blocks.num_blocks,
            num_sessions=self._sessions.num_with_kv,
            num_running=self._sessions.num_running,
            draining=self._inbox.is_closed or self._watchdog.is_stalled,
            num_steps=self._watchdog.num_steps,
            step_limit_s=self._step_limit_s(),
        )

    def stats(self) -> EngineStats:
        """Return the state and the counts of the loop; any thread may call this."""
        state_bytes, is_stalled = self._worker.shape.state_bytes, self._watchdog.is_stalled
        return read_stats(self._calls, len(self._arrived), state_bytes, is_stalled=is_stalled)

    def usual_step_s(self, num_context_tokens: int) -> float:
        """Return the mean seconds of a step of one token with this context; 0 before any measurement."""
        return self._scheduler.usual_step_s(num_context_tokens)

    def kv_len(self, session_id: str) -> int:
        """Return the number of a session's tokens with KV; 0 for an unknown session."""
        sequence = self._sessions.get(session_id)
        return 0 if sequence is None else sequence.kv_len

    def check_integrity(self) -> None:
        """Check reference counts and block tables between two steps, while no call runs or after `close`.

        Raises:
            RuntimeError: a block is not owned as counted.
        """
        self._inbox.wait_for(self._sessions.check_integrity)

    def _step_limit_s(self) -> float:
        """Return the time limit of the running step, plus the wait of calls for a pin or for restored blocks."""
        limit_s = self._watchdog.limit_s() + max(0.0, self._wakes_at_s - self._clock()) + NO_STEP_PATIENCE_S
        return limit_s if math.isfinite(limit_s) else 0.0

    def _join(self) -> None:
        while self._thread.is_alive() and not self._watchdog.is_stalled:
            self._thread.join(LOOK_INTERVAL_S)

    def _note_lost(self, lost: WorkerLost) -> None:
        """Note that the worker is lost, idle or in a step that waits for a lost rank. Any thread may call."""
        self._watchdog.give_up(f"{lost.message}; the replica ends")
        self._set_ended(DeviceLost(lost.message))

    def _set_ended(self, error: SpecdecError | None = None) -> None:
        """Record the end of the thread. The first call wins, because two threads may find a lost worker."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)

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
                self._masks.close()
                self._end(outcome)
                self._worker.close()
        except DeviceLost as lost:
            _log.critical("%s", lost.message)
            self._set_ended(lost)
        except BaseException as error:
            _log.critical("the device thread broke down", exc_info=True)
            self._set_ended(Internal(f"the engine's device thread broke down: {error!r}"))
        else:
            self._set_ended()

    def _run_turns(self) -> None:
        with torch.inference_mode():
            while self._inbox.run_commands(self._patience_s(), may_end=not self._calls.jobs):
                self._preemptible_calls.preempt()
                begun = self._calls.start_waiting()
                if self._tier_restorer is not None:
                    self._tier_restorer.turn([job for job in begun if not job.call.preemptible])
                if self._calls.is_short_of_blocks:
                    self._desk.end_youngest_run()
                if self._calls.running:
                    for job in self._steps.run(self._awaited):
                        for answer in job.take_step_answers():
                            self._calls.tell_step(job, answer)
                        if job.answer is not None:
                            self._desk.finish(job)
                elif self._outbox.is_empty:  # answers leave first
                    self._steps.run_ahead(self._idle_drafting)
                self._watchdog.note_turn()
                self._outbox.deliver()

    def _patience_s(self) -> float | None:
        """Return how long the thread may sleep without a new command, in seconds; None for any time."""
        if self._calls.may_run or self._idle_drafting.has_work():
            return 0.0
        pin_end_s = self._calls.pin_end_s
        wake_s = float("inf") if pin_end_s is None else pin_end_s
        if self._tier_restorer is not None:
            wake_s = min(wake_s, self._tier_restorer.end_s)
        if wake_s == float("inf"):
            return None
        self._wakes_at_s = wake_s
        return max(0.0, wake_s - self._clock())

    def _end(self, outcome: SpecdecError) -> None:
        """End the thread. Jobs are left only after a fault; they get `outcome`, so that no caller waits forever."""
        self._inbox.close()
        self._inbox.run_commands(0.0, may_end=False)
        self._calls.end_all(outcome)
        self._outbox.deliver()
        self._sessions.release_all()

    def _admit(self, call: Call, waiter: Waiter, arrival_s: float) -> None:
        self._arrived.discard(waiter)
        if not waiter.future.done():  # neither cancelled nor failed because the device is stalled
            self._desk.admit(call, waiter, arrival_s)

    def _renew(self, position: SessionPosition, until: int, committed_len: int) -> None:
        job = self._calls.jobs.get(position.session_id)
        if job is not None and job.call.position is position:
            job.renew(until, committed_len)
