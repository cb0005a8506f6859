"""The gate and the session table on one event loop, for engines whose steps run elsewhere.

A simulated device (`specdec.engine.simulated.simulated_replica`) and a backend (`target_service.backends.engine`) run a
call's steps outside this process's device loop. Both let calls pass the same gate (`calls`) and session table (`table`)
as the device loop does, and answer a job when its steps have ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Generic

from specdec.contract.engine_api import EndedTurn
from specdec.contract.errors import SpecdecError, Unavailable
from specdec.engine.sessions.block_manager import BlockManager
from specdec.engine.sessions.calls import Call, Calls, JobT
from specdec.engine.sessions.sequence import Sequence
from specdec.engine.sessions.table import SessionTable


class EventLoopGate(Generic[JobT]):
    """Admits calls and gives them their answers. Use from one event loop."""

    def __init__(
        self,
        num_kv_blocks: int,
        *,
        make_job: Callable[[Call, Sequence, float], JobT],
        begin: Callable[[JobT, float], None],
        may_abandon: Callable[[JobT], bool],
        drop: Callable[[JobT], None] = lambda job: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            num_kv_blocks: number of KV blocks.
            make_job: makes the job of an admitted call from its sequence and the time of its arrival.
            begin: starts a job's steps, at a time. `finish` or `fail` ends the job.
            may_abandon: returns whether a job ends when all its callers have left.
            drop: stops the steps of a job that has ended without an answer: superseded, released or abandoned.
            clock: measures when pins end.
        """
        self.blocks = BlockManager(num_kv_blocks)
        self.sessions = SessionTable(self.blocks, clock=clock)
        self.calls: Calls[JobT, asyncio.Future[Any]] = Calls(self.sessions, _resolve, tell_step=self._tell_step)
        self._on_step: dict[asyncio.Future[Any], Callable[[Any], None]] = {}
        """Takers of the steps of runs, by the future of the last answer."""
        self.is_closing = False
        self._make_job = make_job
        self._begin = begin
        self._may_abandon = may_abandon
        self._drop = drop
        self._clock = clock
        self._pin_timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()  # set once it is closing and has no jobs
        self._closed = asyncio.Event()

    async def call(self, call: Call, on_step: Callable[[Any], None] | None = None) -> Any:
        """Run a call and return its answer, as `specdec.engine.loop.device_loop.EngineLoop.call` does."""
        if self.is_closing:
            raise Unavailable("this replica is draining", reason="DRAINING")
        arrival_s = time.monotonic()
        waiter = asyncio.get_running_loop().create_future()
        session_id = call.position.session_id
        if on_step is not None:
            self._on_step[waiter] = on_step
        before = self.calls.jobs.get(session_id)
        try:
            sequence = self.calls.admit(call, waiter)
            if sequence is not None:
                self.sessions.align(sequence, call.position, call.draft_token_ids)
                self.calls.enter(self._make_job(call, sequence, arrival_s), waiter)
        finally:  # even if this call failed, it may have ended another one
            self._drop_if_ended(before)
            self._start_waiting(arrival_s)
        try:
            return await waiter
        except asyncio.CancelledError:
            job = self.calls.jobs.get(session_id)
            if job is not None and self._may_abandon(job):
                self.calls.abandon(session_id, waiter)
                self._drop_if_ended(job)
                self._start_waiting(time.monotonic())
            raise
        finally:
            self._on_step.pop(waiter, None)

    def is_current(self, job: JobT) -> bool:
        """Return whether a job still waits for its answer: it may have been superseded, released or abandoned."""
        return self.calls.jobs.get(job.sequence.session_id) is job

    def tell_step(self, job: JobT, answer: Any) -> None:
        """Send the answer of a current run's step to the caller."""
        self.calls.tell_step(job, answer)

    def finish(self, job: JobT, answer: Any) -> None:
        """Store the answer of a current job and send it to the callers."""
        self.calls.finish(job, answer)
        self._start_waiting(time.monotonic())

    def fail(self, job: JobT, error: SpecdecError) -> None:
        """End a current job with an error."""
        self.calls.fail(job, error)
        self._start_waiting(time.monotonic())

    def release(self, session_ids: list[str]) -> None:
        """Free the KV of sessions; calls in flight on them miss. Idempotent."""
        for session_id in session_ids:
            job = self.calls.jobs.get(session_id)
            self.calls.release(session_id)
            self._drop_if_ended(job)
        self._start_waiting(time.monotonic())

    def end_turns(self, turns: list[EndedTurn]) -> None:
        """Abandon the calls of turns and give back the KV blocks reserved for them. Idempotent."""
        for turn in turns:
            job = self.calls.jobs.get(turn.session_id)
            self.calls.end_turn(turn.session_id, turn.epoch)
            self._drop_if_ended(job)
        self._start_waiting(time.monotonic())

    async def drain(self) -> None:
        """Refuse new calls, and return once those in flight have ended. Idempotent."""
        self.is_closing = True
        self._start_waiting(time.monotonic())
        await self._idle.wait()

    def end(self) -> None:
        """Free everything after `drain`, and let `wait_ended` return."""
        self.sessions.release_all()
        self._closed.set()

    async def wait_ended(self) -> None:
        """Return once `end` was called."""
        await self._closed.wait()

    def _tell_step(self, waiter: asyncio.Future[Any], answer: Any) -> None:
        if not waiter.done():
            self._on_step[waiter](answer)

    def _drop_if_ended(self, job: JobT | None) -> None:
        if job is not None and not self.is_current(job):
            self._drop(job)

    def _start_waiting(self, now_s: float) -> None:
        """Begin the jobs that have their blocks, and schedule another call for the end of a pin that jobs wait for."""
        for job in self.calls.start_waiting():
            self._begin(job, now_s)
        if self._pin_timer is not None:
            self._pin_timer.cancel()
            self._pin_timer = None
        if self.calls.pin_end_s is not None:
            left_s = max(0.0, self.calls.pin_end_s - self._clock())
            self._pin_timer = asyncio.get_running_loop().call_later(
                left_s, lambda: self._start_waiting(time.monotonic())
            )
        if self.is_closing and not self.calls.jobs:
            self._idle.set()


def _resolve(waiter: asyncio.Future[Any], outcome: Any) -> None:
    if waiter.done():  # the caller has gone
        return
    if isinstance(outcome, BaseException):
        waiter.set_exception(outcome)
    else:
        waiter.set_result(outcome)
