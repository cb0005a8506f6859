"""A device that computes nothing: each step takes a modelled time, and calls join between steps.

One thread runs events at absolute times. Each event receives the time at which it was due, not the time at which it
ran, so delays of the machine do not accumulate; a caller sees only the delay of its own answer. asyncio's timers are
not used because their resolution is a millisecond.

A call comes from its replica's gate (`specdec.engine.sessions.calls`), and its answer goes back through the gate to the
`servicer`. Called by `simulated_replica`.
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
from typing import Any

from specdec.engine.base import StepObserver
from specdec.engine.schedule.awaited_sessions import AwaitedSessions
from specdec.engine.schedule.scheduler import Scheduler

_PR_SET_TIMERSLACK = 29  # linux/prctl.h

#: Maximum number of sessions whose branches are kept; the oldest are dropped first.
MAX_BRANCHED_SESSIONS = 1024

#: Maximum number of branch tokens of one step; the branches of further sessions wait.
MAX_BRANCH_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ModelledTime:
    """Duration of a forward pass."""

    fixed_s: float
    per_token_s: float

    def step_s(self, num_tokens: int) -> float:
        """Return the seconds of a step of `num_tokens` tokens, over all its sessions."""
        return self.fixed_s + self.per_token_s * num_tokens


class Timeline:
    """A thread that runs actions in the order of their absolute `time.monotonic()` times."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[float], object]]] = []
        self._order = itertools.count()
        self._wake = threading.Condition()
        self._is_ended = False
        self._thread = threading.Thread(target=self._run, name="simulated-device", daemon=True)
        self._thread.start()

    def at(self, due_s: float, action: Callable[[float], object]) -> None:
        """Run `action(due_s)` at that time or as soon as possible after it. May be called from any thread."""
        with self._wake:
            heapq.heappush(self._events, (due_s, next(self._order), action))
            self._wake.notify()

    def end(self) -> None:
        """End the thread; actions that are not yet due never run. Idempotent."""
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
    """Ask the kernel not to batch this thread's timers, which delays them by 50 us; Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


@dataclass(eq=False, slots=True)
class Branches:
    """Drafts for each likely outcome of a round that is being verified.

    The first step runs the last draft token, because outcomes after full acceptance need its distribution. Each later
    step drafts one token of every branch.
    """

    num_branches: int
    num_steps: int
    committed_lens: range
    """Committed lengths after the round that have a branch."""
    num_done: int = 0


@dataclass(eq=False, slots=True)
class Work:
    """The steps of one call: the first runs all tokens without KV, in chunks if they are many, each later one a token.

    Implements `specdec.engine.schedule.scheduler.Schedulable`.
    """

    session_id: str
    num_pending: int
    num_steps: int
    context_tokens: int
    """Number of committed tokens of the session."""
    finish: Callable[[float], None]
    """Called on the device's thread with the time at which the last step ended."""
    is_hit: bool = False
    """True if the session's newest token was guessed; the steps of its branches then count as first steps."""
    branches: Branches | None = None
    """Branches to draft at low priority once this is done."""
    job: Any = None
    """Job of a run, for `SimulatedDevice.on_steps`; None for other calls."""
    num_done: int = 0
    kv_len: int = 0
    num_logit_rows: int = 1
    last_step: int = 0
    began_s: float | None = None
    """Time at which its first step began; None before that."""
    step_s: float = 0.0
    """Duration of its newest step."""
    step_tokens: int = 0
    """Number of tokens of its newest step, including those of other sessions."""
    step_runs: int = 0
    """Number of runs in its newest step."""


@dataclass
class SimulatedDevice:
    """Runs work in steps that the real scheduler plans: calls that wait when a step begins may join it.

    Calls always precede branches, but a step that has begun also ends: a cancelled branch costs at most one step.
    """

    forward: ModelledTime
    timeline: Timeline
    scheduler: Scheduler
    observer: StepObserver | None = None
    on_steps: Callable[[list[Work], float], None] = lambda works, now_s: None
    """Called on the timeline's thread with the runs that go on after a step, and the time at which it ended."""
    _waiting: list[Work] = field(default_factory=list)
    _running: list[Work] = field(default_factory=list)
    _branches: dict[str, Branches] = field(default_factory=dict)
    _awaited: AwaitedSessions = field(default_factory=AwaitedSessions)
    _is_busy: bool = False

    def submit(self, work: Work, arrival_s: float) -> None:
        """Let work arrive at a time. May be called from any thread."""
        self.timeline.at(arrival_s, lambda now_s: self._arrive(work, now_s))

    def set_end(self, work: Work, num_steps: int, at_s: float) -> None:
        """Let a run go on until it has done `num_steps` steps, or end with its next one. May be called from any thread.

        The order arrives at `at_s`.
        """

        def set_num_steps(_: float) -> None:
            work.num_steps = max(num_steps, work.num_done + 1)

        self.timeline.at(at_s, set_num_steps)

    def forget(self, session_id: str) -> None:
        """Drop a session's branches and stop expecting its next call. May be called from any thread."""
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
        for work, _ in plan:
            work.began_s = now_s if work.began_s is None else work.began_s
        num_tokens = sum(num_tokens for _, num_tokens in plan)
        step_s = self.forward.step_s(num_tokens)
        self._occupy(now_s, step_s, len(plan), num_tokens, lambda end_s: self._end_call_step(plan, step_s, end_s))

    def _end_call_step(self, plan: list[tuple[Work, int]], step_s: float, now_s: float) -> None:
        self.scheduler.observe_step(step_s)
        step_tokens = sum(num_tokens for _, num_tokens in plan)
        num_runs = sum(work.job is not None for work, _ in plan)
        going_on: list[Work] = []
        for work, num_tokens in plan:
            work.step_s, work.step_tokens, work.step_runs = step_s, step_tokens, num_runs
            work.kv_len += num_tokens
            work.num_pending -= num_tokens
            if not work.num_pending:
                work.num_done += 1
                work.num_pending = work.num_logit_rows = 1
                self._finish_if_done(work, now_s)
                if work.job is not None and work.num_done < work.num_steps:
                    going_on.append(work)
        if going_on:
            self.on_steps(going_on, now_s)

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
        """Begin a step of `step_s`; at its end, call `end` with the time and begin the next step."""
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
        """Return unfinished branches, oldest first, up to `MAX_BRANCH_TOKENS` tokens."""
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
