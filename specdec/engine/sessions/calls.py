"""The one gate for calls of sessions: join the same call, repeat a stored answer, or supersede what is in work.

    admit ─▶ align ─▶ enter ─▶ waiting ─▶ running ─▶ finish: stored, and told to whoever waits
      │                                      hold │ ▲ go_on
      │                                           ▼ │
      │                                         restoring: KV for its blocks is on its way
      │ the same call is in work: waits for its answer
      │ it was answered: told at once
      │ another call of the session is in work: that one ends with StaleEpoch

A call waits while blocks that others hold, or pins, may come back, in order of arrival. From here a round goes
where its caller runs it, a step of the device (`specdec.engine.loop.steps`, or a simulated one), and its answer back
through `tell`.

Not here: which tokens have KV (`table`), steps, threads, what a waiter is. Called by `specdec.engine.loop.device_loop`
from the device thread and by `specdec.engine.simulated.replica` on its event loop, each from one thread alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from specdec.engine.sessions.sequence import Sequence, StoredAnswer
from specdec.engine.sessions.table import SessionTable
from specdec.errors import KvMiss, ResourceExhausted, SpecdecError, StaleEpoch
from specdec.types import ProposeRequest, ScoreRequest, SessionPosition, TokenIds, VerifyRequest


@dataclass(frozen=True, slots=True)
class Call:
    """A validated request, in the terms of the engine."""

    request: ProposeRequest | VerifyRequest | ScoreRequest
    digest: bytes
    """Of everything that was asked; with (session, epoch, round) the idempotency key."""
    draft_token_ids: TokenIds
    """uint32 [L]: tokens to run after the committed ones."""
    num_logit_rows: int
    """Rows wanted when the committed and draft tokens have run; at least 1."""
    max_kv_len: int
    """The most tokens that can need KV before the job finishes."""
    preemptible: bool = False
    """Nobody waits for it: it ends where another call comes, and its session with it."""
    keeps_session: bool = False
    """Of one that yields: its session is left to the next one, until somebody releases it."""
    local_draft: str = ""
    """What the worker is to draft with before the tokens run, one of `ModelShape.local_drafts`; "": nothing."""

    @property
    def position(self) -> SessionPosition:
        return self.request.position


class CallInWork(Protocol):
    """What the gate must know of a job: a call with its aligned sequence."""

    call: Call
    sequence: Sequence
    num_cached_tokens: int
    """Committed tokens that needed no forward pass; set when the job begins to run."""


JobT = TypeVar("JobT", bound=CallInWork)
WaiterT = TypeVar("WaiterT")


class Calls(Generic[JobT, WaiterT]):
    """Every call in work, at most one a session, with those who wait for its answer."""

    def __init__(self, sessions: SessionTable, tell: Callable[[WaiterT, Any], None]) -> None:
        """`tell` hands a waiter its outcome: an answer, or an error to raise."""
        self.sessions = sessions
        self.jobs: dict[str, JobT] = {}
        """By session id: running and waiting."""
        self.running: list[JobT] = []
        """In order of arrival."""
        self.restoring: list[JobT] = []
        """They have their blocks, and run once whoever held them lets them go on."""
        self.pin_end_s: float | None = None
        """On the session table's clock, while nothing but pins and those that restore keep calls from running: when to
        try again; infinite: when one of those goes on."""
        self._tell = tell
        self._waiters: dict[JobT, list[WaiterT]] = {}
        self._waiting: deque[JobT] = deque()  # for KV blocks, in order of arrival

    @property
    def may_run(self) -> bool:
        """Whether a job runs, or one that waits may begin to."""
        return len(self.jobs) > len(self.restoring) and self.pin_end_s is None

    def admit(self, call: Call, waiter: WaiterT) -> Sequence | None:
        """Joins, repeats or supersedes.

        Returns:
            The session's sequence, for the caller to align and `enter`; None: `waiter` has its answer or will get it.

        Raises:
            StaleEpoch: a newer call of the session has been seen.
        """
        position = call.position
        sequence = self.sessions.fence(position)
        job = self.jobs.get(sequence.session_id)
        if (position.epoch, position.round_id) == (sequence.epoch, sequence.newest_round):
            if job is not None and job.call.digest == call.digest:
                self._waiters[job].append(waiter)
                return None
            if job is None and sequence.answer is not None and sequence.answer.digest == call.digest:
                self._tell(waiter, sequence.answer.value)
                return None
        if job is not None:
            self.end(job, StaleEpoch(f"superseded by a newer call of session {sequence.session_id}"))
        return sequence

    def enter(self, job: JobT, waiter: WaiterT) -> None:
        """Takes in the job of a call that was admitted and aligned; it waits for its blocks."""
        self.jobs[job.sequence.session_id] = job
        self._waiters[job] = [waiter]
        self._waiting.append(job)

    def start_waiting(self) -> list[JobT]:
        """Lets jobs run in order of arrival as far as KV blocks go; returns those that begin now.

        A job that the pool can never hold, or that has nothing to wait for, ends with ResourceExhausted.
        """
        self.pin_end_s = None
        begun: list[JobT] = []
        while self._waiting:
            job = self._waiting[0]
            try:
                if not self._reserve(job):
                    if self.running:
                        break
                    self.pin_end_s = self.sessions.next_pin_end_s()
                    if self.pin_end_s is None and self.restoring:
                        self.pin_end_s = float("inf")
                    if self.pin_end_s is not None:
                        break
                    raise ResourceExhausted("no KV block is left on this replica", reason="KV_EXHAUSTED")
            except ResourceExhausted as error:
                self.end(job, error)
            else:
                job.num_cached_tokens = min(job.sequence.kv_len, job.call.position.committed_len)
                self.running.append(self._waiting.popleft())
                begun.append(job)
        return begun

    def hold(self, job: JobT) -> None:
        """Keeps a job that runs from doing so, with all its blocks, until `go_on`."""
        self.running.remove(job)
        self.restoring.append(job)

    def go_on(self, job: JobT) -> None:
        """Lets a job run that was held; it may have more KV than before."""
        self.restoring.remove(job)
        self.running.append(job)
        job.num_cached_tokens = min(job.sequence.kv_len, job.call.position.committed_len)

    def finish(self, job: JobT, answer: Any) -> None:
        """Stores a job's answer under its idempotency key and tells it."""
        self.sessions.store_answer(job.sequence, StoredAnswer(job.call.digest, answer))
        self.end(job, answer)

    def fail(self, job: JobT, error: SpecdecError) -> None:
        """Ends a job whose KV is not to be trusted."""
        self.sessions.invalidate(job.sequence)
        self.end(job, error)

    def end(self, job: JobT, outcome: Any) -> None:
        """Takes a job out; `outcome`, an answer or an error, goes to everyone who waits for it."""
        del self.jobs[job.sequence.session_id]
        next(jobs for jobs in (self.running, self.restoring, self._waiting) if job in jobs).remove(job)
        for waiter in self._waiters.pop(job):
            self._tell(waiter, outcome)
        self.sessions.settle(job.sequence)

    def end_all(self, outcome: SpecdecError) -> None:
        for job in list(self.jobs.values()):
            self.end(job, outcome)

    def abandon(self, session_id: str, waiter: WaiterT) -> None:
        """A caller went away: the job goes too unless someone else waits for it."""
        job = self.jobs.get(session_id)
        if job is None or waiter not in self._waiters[job]:
            return
        self._waiters[job].remove(waiter)
        if not self._waiters[job]:
            self.end(job, None)

    def release(self, session_id: str) -> None:
        """Forgets a session and frees its KV; a call in work on it misses. An unknown id is fine."""
        job = self.jobs.get(session_id)
        if job is not None:
            # Not stale: the session may have been made anew while the release was under way.
            self.end(job, KvMiss(f"session {session_id} was released; send from 0 on", have=0))
        self.sessions.release(session_id)

    def _reserve(self, job: JobT) -> bool:
        # While something runs, or soon will, blocks will come back by themselves.
        behind = () if self.running or self.restoring else [other.sequence for other in reversed(self._waiting)]
        return self.sessions.reserve(
            job.sequence,
            committed_len=job.call.position.committed_len,
            max_kv_len=job.call.max_kv_len,
            preemptable=behind,
        )
