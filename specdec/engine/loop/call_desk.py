"""Admission and end of calls on the device thread: a call becomes a job, and a job's answer is stored and sent.

    admit ─▶ gate (`sessions.calls`) ─▶ backlog ─▶ align, or continue a branch ─▶ enter ... steps ... finish

The first call of a turn is refused if the prompts before it would keep it waiting for too long, by the scheduler's
measurements. `device_loop` posts calls here and runs the jobs. Everything in this module runs on the device thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specdec.contract.engine_api import EndedTurn
from specdec.contract.errors import Internal, ResourceExhausted, SpecdecError
from specdec.engine.base import StepObserver
from specdec.engine.loop.delivery import Outbox, Waiter
from specdec.engine.loop.idle_drafting import Branch, IdleDrafting
from specdec.engine.loop.job import Job
from specdec.engine.loop.preemptible_calls import PreemptibleCalls
from specdec.engine.schedule.awaited_sessions import AwaitedSessions
from specdec.engine.schedule.scheduler import Scheduler, is_short
from specdec.engine.sessions.calls import Call, Calls
from specdec.engine.sessions.reservations import is_within_reservation
from specdec.engine.sessions.sequence import Sequence


def require_short_backlog(
    call: Call, sequence: Sequence, running: Iterable[Job], scheduler: Scheduler, max_wait_s: float
) -> None:
    """Check that a call would not wait for longer than `max_wait_s` behind the prompts of running calls.

    Raises:
        ResourceExhausted: it would, and it may be refused (QUEUE_FULL); the error says when to try again.
    """
    if not call.may_refuse or sequence.reserved_len:
        return
    num_tokens = sum(job.num_pending for job in running if not is_short(job))
    wait_s = scheduler.predict_replay_s(num_tokens, 0) if num_tokens else 0.0
    if wait_s > max_wait_s:
        raise ResourceExhausted(
            f"prompts of {num_tokens} tokens wait on this replica, for {wait_s:.1f} s; the limit is {max_wait_s:g} s "
            "(--max-wait-s)",
            retry_after_s=wait_s - max_wait_s,
        )


_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CallDesk:
    """Turns calls into jobs and jobs into answers. Device thread only."""

    calls: Calls[Job, Waiter]
    outbox: Outbox
    scheduler: Scheduler
    awaited: AwaitedSessions
    """Sessions whose next call is expected."""
    idle_drafting: IdleDrafting
    preemptible_calls: PreemptibleCalls
    publish: Callable[[Sequence, int], None]
    """Offers a sequence's full blocks to other sessions, up to a number of tokens."""
    observer: StepObserver | None
    max_wait_s: float
    """Longest wait behind the prompts of running calls."""
    clock: Callable[[], float]

    def admit(self, call: Call, waiter: Waiter, arrival_s: float) -> None:
        """Begin a call, join it to the same one, or give its waiter an answer or an error."""
        sequence: Sequence | None = None
        try:
            if call.preemptible:
                self.preemptible_calls.require_idle(call, self.awaited.count(arrival_s))
            sequence = self.calls.admit(call, waiter)
            if sequence is not None:
                self._begin(call, waiter, arrival_s, sequence)
        except SpecdecError as error:
            self.outbox.put(waiter, error)
        except Exception:
            call.context.run(_log.exception, "admission failed")
            failure = Internal("the engine failed to admit the call")
            job = self.calls.jobs.get(call.position.session_id)
            if job is not None:
                self.calls.end(job, failure)
            if sequence is not None:
                self.calls.sessions.invalidate(sequence)
            self.outbox.put(waiter, failure)

    def finish(self, job: Job) -> None:
        """Store a job's answer and send it."""
        self.calls.finish(job, job.answer)
        if job.call.preemptible:
            return
        if self.observer is not None:
            self.observer.observe_queue(job.queue_s)
        self.awaited.note_answered(job.sequence.session_id, self.clock())
        self.idle_drafting.note_answered(job)

    def end_youngest_run(self) -> None:
        """Let the youngest run that holds blocks beyond its reservation end with the next step: other calls wait."""
        beyond = [job for job in self.calls.running if job.call.run and not is_within_reservation(job.sequence)]
        if beyond:
            max(beyond, key=lambda job: job.sequence.turn_order).until = 0

    def end_turns(self, turns: tuple[EndedTurn, ...], waiter: Waiter) -> None:
        """End turns: abandon their calls and give back the blocks that are reserved for them."""
        for turn in turns:
            self.calls.end_turn(turn.session_id, turn.epoch)
            self.awaited.note_back(turn.session_id)
        self.outbox.put(waiter, None)

    def release(self, session_ids: tuple[str, ...], waiter: Waiter) -> None:
        """Forget sessions and free their KV; their running calls end with KvMiss."""
        for session_id in session_ids:
            self.calls.release(session_id)
            self.awaited.note_back(session_id)
        self.outbox.put(waiter, None)

    def _begin(self, call: Call, waiter: Waiter, arrival_s: float, sequence: Sequence) -> None:
        """Align an admitted call, or continue the branch that assumed it."""
        require_short_backlog(call, sequence, self.calls.running, self.scheduler, self.max_wait_s)
        sessions = self.calls.sessions
        knows_start = sessions.knows_start(sequence, call.position)
        branch = self.idle_drafting.take(sequence, call) if knows_start else None
        if branch is None:
            sessions.align(sequence, call.position, call.draft_token_ids)
        else:
            sessions.adopt_fork(sequence, call.position, branch.job.sequence)
        job = Job(call, sequence, arrival_step=self.scheduler.num_steps, arrival_s=arrival_s, clock=self.clock)
        self.calls.enter(job, waiter)
        self.awaited.note_back(sequence.session_id)
        if branch is not None:
            self._resume(job, branch)

    def _resume(self, job: Job, branch: Branch) -> None:
        """Continue from a branch that assumed the job's call; often the branch is the answer."""
        committed_len = job.call.position.committed_len
        job.num_cached_tokens = committed_len
        self.idle_drafting.resume(job, branch)
        self.publish(job.sequence, committed_len)
        if job.answer is not None:
            self.finish(job)
