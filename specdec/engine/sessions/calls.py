"""The gate for calls of sessions: join the same call, repeat a stored answer, or supersede the running call.

    admit ─▶ align ─▶ enter ─▶ waiting ─▶ running ─▶ finish: stored, and sent to all waiters
      │                                      hold │ ▲ go_on
      │                                           ▼ │
      │                                         restoring: KV for its blocks is being fetched
      │ the same call is in progress: wait for its answer
      │ it was answered: return the stored answer
      │ another call of the session is in progress: that one ends with StaleEpoch

A call waits while blocks that are held or pinned may still be released (`kv_queue`). The caller then runs the round in
steps of the device (`specdec.engine.loop.steps`, or a simulated one), and the answer returns through `tell`.

`table` knows which tokens have KV. Called by `specdec.engine.loop.device_loop` from the device thread and by
`event_loop_gate` on its event loop, each from one thread alone.
"""

from __future__ import annotations

import contextvars
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from specdec.contract.constraint import Constraint
from specdec.contract.errors import KvMiss, ResourceExhausted, SpecdecError, StaleEpoch
from specdec.contract.types import ProposeRequest, RunLimit, ScoreRequest, SessionPosition, TokenIds, VerifyRequest
from specdec.engine.sessions.block_manager import blocks_for
from specdec.engine.sessions.kv_queue import KvQueue, WaitLimits
from specdec.engine.sessions.reservations import is_within_reservation, shortage
from specdec.engine.sessions.sequence import Identity, Sequence, StoredAnswer
from specdec.engine.sessions.table import SessionTable

DEFAULT_LIMITS = WaitLimits()

_DIGEST_BYTES = 16

#: Default limit on the tokens of a run ahead of the committed ones.
DEFAULT_MAX_RUN = 64


@dataclass(frozen=True, slots=True)
class Call:
    """A request as the engine runs it. It was checked when it was decoded (`specdec.rpc.codec`)."""

    request: ProposeRequest | VerifyRequest | ScoreRequest
    identity: Identity
    """Contents of the whole request; with (session, epoch, round) the idempotency key. Empty if it is never repeated.
    """
    draft_token_ids: TokenIds
    """uint32 [L]: tokens to run after the committed ones."""
    num_logit_rows: int
    """Number of rows of logits to return once the committed and draft tokens have run; at least 1."""
    max_kv_len: int
    """Largest number of tokens that can need KV before the job finishes."""
    preemptible: bool = False
    """True if no client waits for the call: it ends, with its session, when another call arrives."""
    keeps_session: bool = False
    """True if the session of a preemptible call stays for the next one, until it is released."""
    local_draft: str = ""
    """Draft that the worker makes before the tokens run, one of `ModelShape.local_drafts`; "" for none."""
    reserved_len: int = 0
    """Number of tokens for which blocks stay reserved until the turn ends; 0: none."""
    run: RunLimit | None = None
    """Set for a run: the job goes on after its first step."""
    constraint: Constraint | None = None
    """Constraint that masks p; None for none."""
    may_refuse: bool = False
    """True if the call is refused, instead of waiting longer than the limits, if KV blocks are reserved for others:
    its turn has no output yet, or gets along without the answer."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context, compare=False, repr=False)
    """Context in which the call was made, whose ids its log records have on the device thread too."""

    @property
    def needed_len(self) -> int:
        """Number of tokens for which the call needs blocks, the reserved ones included."""
        return max(self.max_kv_len, self.reserved_len)

    @property
    def position(self) -> SessionPosition:
        """Session position of the request."""
        return self.request.position


def identity_of(request: ProposeRequest | VerifyRequest) -> Identity:
    """Return what a request says. Token ids are digested, because a session keeps the identity of its last request."""
    position = request.position
    arrays = [position.token_ids]
    if isinstance(request, VerifyRequest):
        arrays += [request.draft_token_ids, *request.support_ids]
        rest: Identity = (request.num_logprobs, request.local_draft, request.model)
    else:
        rest = (request.gamma,)
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for array in arrays:
        digest.update(len(array).to_bytes(4, "little"))
        digest.update(np.ascontiguousarray(array, dtype="<u4").tobytes())
    place = position.start, position.prefix_hash, position.turn, position.output_start
    return (*place, position.seed, position.draw_rule, position.filters, digest.digest(), *rest)


class CallInWork(Protocol):
    """The part of a job that the gate uses: a call with its aligned sequence."""

    call: Call
    sequence: Sequence
    num_cached_tokens: int
    """Number of committed tokens that needed no forward pass; set when the job begins to run."""


JobT = TypeVar("JobT", bound=CallInWork)
WaiterT = TypeVar("WaiterT")


class Calls(Generic[JobT, WaiterT]):
    """All calls in progress, at most one a session, with the waiters for their answers."""

    def __init__(
        self,
        sessions: SessionTable,
        tell: Callable[[WaiterT, Any], None],
        limits: WaitLimits = DEFAULT_LIMITS,
        tell_step: Callable[[WaiterT, Any], None] = lambda waiter, answer: None,
    ) -> None:
        """
        Args:
            sessions: the sessions of the replica.
            tell: gives a waiter its outcome: an answer, or an error to raise.
            tell_step: gives a waiter the answer of a run's step.
            limits: bounds on the calls that wait for KV blocks.
        """
        self.sessions = sessions
        self.jobs: dict[str, JobT] = {}
        """Running and waiting jobs by session id."""
        self.running: list[JobT] = []
        """Running jobs in order of arrival."""
        self.restoring: list[JobT] = []
        """Jobs that have their blocks and run after `go_on`."""
        self.pin_end_s: float | None = None
        """Time to try again, on the session table's clock, while no job runs and the waiting ones wait for the end of
        pins, turns and restoring jobs.

        Infinite: try again when a restoring job goes on. None: no such wait.
        """
        self.is_short_of_blocks = False
        """True while calls wait for KV blocks."""
        self.num_exhausted = 0
        """Number of calls that ended because no KV block was left."""
        self._tell = tell
        self._tell_step = tell_step
        self._waiters: dict[JobT, list[WaiterT]] = {}
        self._queue: KvQueue[JobT] = KvQueue(limits)

    @property
    def may_run(self) -> bool:
        """True if a job runs, or if a waiting one may begin to."""
        return len(self.jobs) > len(self.restoring) and self.pin_end_s is None

    def admit(self, call: Call, waiter: WaiterT) -> Sequence | None:
        """Join the same call, repeat its stored answer, or supersede the session's running call.

        Returns:
            The session's sequence, for the caller to align and `enter`; None if `waiter` has its answer or will get it.

        Raises:
            StaleEpoch: a newer call of the session has been seen.
        """
        position = call.position
        sequence = self.sessions.fence(position)
        job = self.jobs.get(sequence.session_id)
        if (position.epoch, position.round_id) == (sequence.epoch, sequence.newest_round):
            if job is not None and job.call.identity == call.identity and call.run is None:  # runs are never joined
                self._waiters[job].append(waiter)
                return None
            if job is None and sequence.answer is not None and sequence.answer.identity == call.identity:
                self._tell(waiter, sequence.answer.value)
                return None
        if job is not None:
            self.end(job, StaleEpoch(f"superseded by a newer call of session {sequence.session_id}"))
        return sequence

    def enter(self, job: JobT, waiter: WaiterT) -> None:
        """Add the job of a call that was admitted and aligned; it waits for its blocks."""
        self.jobs[job.sequence.session_id] = job
        self._waiters[job] = [waiter]
        self._queue.add(job, self.sessions.now_s)

    def start_waiting(self) -> list[JobT]:
        """Start waiting jobs, in the order of the queue, while KV blocks suffice; return those that begin now.

        Behind a job that must wait, only jobs that have their blocks already begin, unless it leaves blocks to other
        tenants. A job that the pool can never hold, or that the queue refuses, ends with ResourceExhausted.
        """
        self.pin_end_s = None
        begun: list[JobT] = []
        if not self._queue:
            self.is_short_of_blocks = False
            return begun
        now_s = self.sessions.now_s
        blocker: JobT | None = None
        leaver: JobT | None = None
        reserved = self.sessions.tenants.reserved_blocks(now_s)
        order = self._queue.in_order(reserved)
        for index, job in enumerate(order):
            try:
                leaves = self.sessions.tenants.num_tenants > 1 and self._queue.must_leave_blocks(
                    job, reserved[job.sequence.tenant], self.sessions.blocks.num_blocks
                )
                if leaves or (blocker and not _has_blocks(job)) or not self._reserve(job, order[index + 1 :]):
                    leaver, blocker = (job, blocker) if leaves else (leaver, blocker or job)
                    if refusal := self._queue.refusal(job, now_s):
                        raise refusal
                    continue
            except ResourceExhausted as error:
                leaver, blocker = (None if job is waiting else waiting for waiting in (leaver, blocker))
                self._refuse(job, error)
            else:
                job.num_cached_tokens = min(job.sequence.kv_len, job.call.position.committed_len)
                self._queue.remove(job)
                self.running.append(job)
                begun.append(job)
                reserved[job.sequence.tenant] += blocks_for(job.sequence.reserved_len)
        waiting = blocker or leaver
        self.is_short_of_blocks = waiting is not None
        if waiting is not None and not self.running:
            self.pin_end_s = self._next_change_s()
            if self.pin_end_s == float("inf") and not self.restoring:
                what, how_many = shortage(waiting.sequence, waiting.call.needed_len)
                self._refuse(
                    waiting,
                    ResourceExhausted(
                        f"no {what} are left on this replica; the request needs {how_many}", reason="KV_EXHAUSTED"
                    ),
                )
        return begun

    def make_room(self, job: JobT) -> None:
        """Take the block that the next token of a run needs, unless calls wait for blocks; the run ends without it."""
        sequence = job.sequence
        if not self.is_short_of_blocks:
            self.sessions.blocks.grow(sequence.block_table, len(sequence) + 1)

    def _refuse(self, job: JobT, error: ResourceExhausted) -> None:
        self.num_exhausted += 1
        self.end(job, error)

    def _next_change_s(self) -> float:
        """Return the time at which waiting jobs may begin or must end, while no job runs."""
        times = (self.sessions.next_release_s(), self._queue.next_refusal_s())
        return min((time_s for time_s in times if time_s is not None), default=float("inf"))

    def hold(self, job: JobT) -> None:
        """Suspend a running job, which keeps all its blocks, until `go_on`."""
        self.running.remove(job)
        self.restoring.append(job)

    def go_on(self, job: JobT) -> None:
        """Resume a suspended job; it may have more KV than before."""
        self.restoring.remove(job)
        self.running.append(job)
        job.num_cached_tokens = min(job.sequence.kv_len, job.call.position.committed_len)

    def finish(self, job: JobT, answer: Any) -> None:
        """Store a job's answer under its idempotency key and send it to the waiters. That of a run is not stored: it
        answers the run's last step alone."""
        if job.call.run is None:
            self.sessions.store_answer(job.sequence, StoredAnswer(job.call.identity, answer))
        self.end(job, answer)

    def tell_step(self, job: JobT, answer: Any) -> None:
        """Send the answer of a run's step to the waiters; the run goes on."""
        for waiter in self._waiters[job]:
            self._tell_step(waiter, answer)

    def fail(self, job: JobT, error: SpecdecError) -> None:
        """End a job with an error and invalidate its KV."""
        self.sessions.invalidate(job.sequence)
        self.end(job, error)

    def end(self, job: JobT, outcome: Any) -> None:
        """Remove a job and send `outcome`, an answer or an error, to all its waiters."""
        del self.jobs[job.sequence.session_id]
        if job in self._queue:
            self._queue.remove(job)
        else:
            (self.running if job in self.running else self.restoring).remove(job)
        for waiter in self._waiters.pop(job):
            self._tell(waiter, outcome)
        self.sessions.settle(job.sequence, is_held=not job.call.preemptible)

    def end_all(self, outcome: SpecdecError) -> None:
        """End every job with the same error."""
        for job in list(self.jobs.values()):
            self.end(job, outcome)

    def abandon(self, session_id: str, waiter: WaiterT) -> None:
        """Remove a waiter that left; the job ends unless another waiter remains."""
        job = self.jobs.get(session_id)
        if job is None or waiter not in self._waiters[job]:
            return
        self._waiters[job].remove(waiter)
        if not self._waiters[job]:
            self.end(job, None)

    def release(self, session_id: str) -> None:
        """Forget a session and free its KV; its running call ends with KvMiss. Unknown ids are ignored."""
        job = self.jobs.get(session_id)
        if job is not None:
            # KvMiss and not StaleEpoch: the session may have been created again while the release was on its way.
            self.end(job, KvMiss(f"session {session_id} was released; send from 0 on", have=0))
        self.sessions.release(session_id)

    def end_turn(self, session_id: str, epoch: int) -> None:
        """End the turn that runs under an epoch: abandon its call, and give back the blocks reserved for it.

        The session's KV stays until others need its blocks. Other epochs and unknown ids are ignored.
        """
        sequence = self.sessions.get(session_id)
        if sequence is None or sequence.epoch != epoch:
            return
        job = self.jobs.get(session_id)
        if job is not None:
            self.end(job, StaleEpoch(f"the turn of session {session_id} has ended"))
        self._queue.note_released(self.sessions.end_turn(sequence), self.sessions.now_s)

    def _reserve(self, job: JobT, behind: list[JobT]) -> bool:
        # While a job runs or is about to, blocks will be released without preempting a waiting job.
        is_idle = not (self.running or self.restoring)
        preemptable = [other.sequence for other in reversed(behind) if _is_beyond_reservation(other)] if is_idle else ()
        call = job.call
        return self.sessions.reserve(
            job.sequence,
            committed_len=call.position.committed_len,
            max_kv_len=call.max_kv_len,
            reserved_len=call.reserved_len,
            has_begun=not call.may_refuse,
            preemptable=preemptable,
        )


def _has_blocks(job: CallInWork) -> bool:
    return len(job.sequence.block_table) >= blocks_for(job.call.max_kv_len)


def _is_beyond_reservation(job: CallInWork) -> bool:
    """Return whether a waiting call's turn has other blocks than those reserved for it, or needs more."""
    return not (is_within_reservation(job.sequence) and _has_blocks(job))
