"""A device that computes nothing: steps take the time a model says, one after the other, calls joining between steps.

Everything happens on one thread that runs events at absolute times, each event told the time it was due, not the time
it ran: what the machine is late by never adds up, and the only lateness a caller can see is that of its own answer.
asyncio's own timers are not used because they are a millisecond coarse.

A call comes from its replica's gate (`specdec.engine.sessions.calls`) and goes, answered, back through it to the
`servicer`.

Not here: what the steps compute (`text`), sessions and calls (`replica`, which alone calls this).
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.engine.base import StepObserver
from specdec.engine.schedule.awaited_sessions import AwaitedSessions
from specdec.engine.schedule.scheduler import Scheduler

_PR_SET_TIMERSLACK = 29  # linux/prctl.h

#: Sessions whose branches are remembered; the oldest go first.
MAX_BRANCHED_SESSIONS = 1024

#: Branch tokens of one step at most; more sessions' branches wait.
MAX_BRANCH_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """How long a forward pass takes."""

    fixed_s: float
    per_token_s: float

    def step_s(self, num_tokens: int) -> float:
        """Return the seconds that a step of `num_tokens` tokens in all takes."""
        return self.fixed_s + self.per_token_s * num_tokens


class Timeline:
    """A thread that runs actions at absolute `time.monotonic()` times, in their order."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[float], object]]] = []
        self._order = itertools.count()
        self._wake = threading.Condition()
        self._is_ended = False
        self._thread = threading.Thread(target=self._run, name="simulated-device", daemon=True)
        self._thread.start()

    def at(self, due_s: float, action: Callable[[float], object]) -> None:
        """Runs `action(due_s)` at that time or as soon after it as can be. From any thread."""
        with self._wake:
            heapq.heappush(self._events, (due_s, next(self._order), action))
            self._wake.notify()

    def end(self) -> None:
        """Ends the thread; what is not yet due never runs. Idempotent."""
        with self._wake:
            self._is_ended = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        _end_waits_punctually()
        while (event := self._next()) is not None:
            due_s, _, action = event
            action(due_s)

    def _next(self) -> tuple[float, int, Callable[[float], object]] | None:
        with self._wake:
            while not self._is_ended:
                left_s = self._events[0][0] - time.monotonic() if self._events else None
                if left_s is not None and left_s <= 0:
                    return heapq.heappop(self._events)
                self._wake.wait(left_s)
            return None


def _end_waits_punctually() -> None:
    """Asks the kernel not to batch this thread's timers with others, which makes them 50 us late; Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


@dataclass(eq=False, slots=True)
class Branches:
    """Drafts for every likely outcome of a round that is being verified.

    The first step runs the last draft token, whose distribution the outcomes after full acceptance need; each later
    step drafts one token of every branch.
    """

    num_branches: int
    num_steps: int
    committed_lens: range
    """Lengths the session may have after the round: any other outcome was not branched."""
    num_done: int = 0


@dataclass(eq=False, slots=True)
class Work:
    """One call's steps: the first runs what has no KV yet, in chunks where it is long, each later one a single token.

    Implements `specdec.engine.schedule.scheduler.Schedulable`.
    """

    session_id: str
    num_pending: int
    num_steps: int
    context_tokens: int
    """Committed tokens of the session."""
    finish: Callable[[float], None]
    """Called on the device's thread with the time at which the last step ended."""
    is_hit: bool = False
    """The session's newest token was guessed: its branches, as far as they got, are the first steps."""
    branches: Branches | None = None
    """What to begin, at low priority, once this is done."""
    num_done: int = 0
    kv_len: int = 0
    num_logit_rows: int = 1
    last_step: int = 0
    step_s: float = 0.0
    step_tokens: int = 0
    """Of its newest step: what that took, and its tokens, other sessions' included."""


@dataclass
class SimulatedDevice:
    """Runs work in steps that a real scheduler plans: calls that wait when a step begins may join it.

    Calls always go before branches, but a step that has begun ends: a cancelled branch costs at most one.
    """

    forward: ForwardTime
    timeline: Timeline
    scheduler: Scheduler
    observer: StepObserver | None = None
    _waiting: list[Work] = field(default_factory=list)
    _running: list[Work] = field(default_factory=list)
    _branches: dict[str, Branches] = field(default_factory=dict)
    _awaited: AwaitedSessions = field(default_factory=AwaitedSessions)
    _is_busy: bool = False

    def submit(self, work: Work, arrival_s: float) -> None:
        """Lets work arrive at a time. From any thread."""
        self.timeline.at(arrival_s, lambda now_s: self._arrive(work, now_s))

    def forget(self, session_id: str) -> None:
        """Drops a session's branches and no longer expects it back. From any thread."""
        self.timeline.at(time.monotonic(), lambda _: self._forget(session_id))

    # Everything below runs on the timeline's thread.

    def _arrive(self, work: Work, now_s: float) -> None:
        work.last_step = self.scheduler.num_steps
        self._awaited.note_back(work.session_id)
        self._waiting.append(work)
        if not self._is_busy:
            self._begin_step(now_s)

    def _forget(self, session_id: str) -> None:
        self._branches.pop(session_id, None)
        self._awaited.note_back(session_id)

    def _begin_step(self, now_s: float) -> None:
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            branches = self._branches.pop(work.session_id, None)
            if branches is not None and work.is_hit and work.context_tokens in branches.committed_lens:
                work.num_done = min(max(0, branches.num_done - 1), work.num_steps)
                if work.num_done:
                    work.num_pending = 1
            self._running.append(work)
            self._finish_if_done(work, now_s)
        if self._running:
            self._begin_call_step(now_s)
        else:
            self._begin_branch_step(now_s)

    def _begin_call_step(self, now_s: float) -> None:
        num_awaited = self._awaited.count(now_s)
        plan = [
            (self._running[chunk.job_index], chunk.num_tokens)
            for chunk in self.scheduler.plan_chunks(self._running, num_awaited=num_awaited)
        ]
        num_tokens = sum(num_tokens for _, num_tokens in plan)
        step_s = self.forward.step_s(num_tokens)
        self._occupy(now_s, step_s, len(plan), num_tokens, lambda end_s: self._end_call_step(plan, step_s, end_s))

    def _end_call_step(self, plan: list[tuple[Work, int]], step_s: float, now_s: float) -> None:
        self.scheduler.observe_step(step_s)
        step_tokens = sum(num_tokens for _, num_tokens in plan)
        for work, num_tokens in plan:
            work.step_s, work.step_tokens = step_s, step_tokens
            work.kv_len += num_tokens
            work.num_pending -= num_tokens
            if not work.num_pending:
                work.num_done += 1
                work.num_pending = work.num_logit_rows = 1
                self._finish_if_done(work, now_s)

    def _begin_branch_step(self, now_s: float) -> None:
        all_branches = self._next_branches()
        if not all_branches:
            return
        num_tokens = sum(branches.num_branches for branches in all_branches)

        def end(_: float) -> None:
            for branches in all_branches:
                branches.num_done += 1

        self._occupy(now_s, self.forward.step_s(num_tokens), len(all_branches), num_tokens, end)

    def _occupy(
        self, now_s: float, step_s: float, num_sequences: int, num_tokens: int, end: Callable[[float], None]
    ) -> None:
        """A step of `step_s` begins; `end` is called with its end, and the next one follows."""
        self._is_busy = True
        if self.observer is not None:
            self.observer.observe_step(num_sequences=num_sequences, num_tokens=num_tokens, seconds=step_s)

        def finish(end_s: float) -> None:
            end(end_s)
            self._is_busy = False
            self._begin_step(end_s)

        self.timeline.at(now_s + step_s, finish)

    def _finish_if_done(self, work: Work, now_s: float) -> None:
        if work.num_done < work.num_steps:
            return
        self._running.remove(work)
        self._awaited.note_answered(work.session_id, now_s)
        if work.branches is not None:
            self._branches[work.session_id] = work.branches
            if len(self._branches) > MAX_BRANCHED_SESSIONS:
                del self._branches[next(iter(self._branches))]
        work.finish(now_s)

    def _next_branches(self) -> list[Branches]:
        """Unfinished branches, oldest first, as many as one step takes."""
        taken: list[Branches] = []
        num_tokens = 0
        for branches in self._branches.values():
            if branches.num_done == branches.num_steps:
                continue
            num_tokens += branches.num_branches
            if taken and num_tokens > MAX_BRANCH_TOKENS:
                break
            taken.append(branches)
        return taken
