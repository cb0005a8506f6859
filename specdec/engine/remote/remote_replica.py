"""A replica in front of an engine elsewhere: sessions and idempotency here, the model there.

A checked call passes the gate and the session table of the event loop (`specdec.engine.sessions.event_loop_gate`),
which know the session's tokens. A subclass asks the engine and makes the answer: `target_service.backends.engine` or
`draft_service.server_draft`. The engine batches the calls of all sessions itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from specdec.contract.engine_api import EndedTurn, EngineInfo, EngineStats
from specdec.contract.errors import Internal, SpecdecError
from specdec.contract.types import Proposal, Verification
from specdec.engine.sessions import sequence as sessions
from specdec.engine.sessions.calls import Call
from specdec.engine.sessions.event_loop_gate import EventLoopGate

#: Number of blocks of tokens that sessions may have here: 1 million tokens, 4 bytes each.
NUM_BLOCKS = 65_536

AnswerT = TypeVar("AnswerT", Proposal, Verification)

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class RemoteJob:
    """A call in progress."""

    call: Call
    sequence: sessions.Sequence
    arrival_s: float
    num_cached_tokens: int = 0
    task: asyncio.Task[None] | None = None
    """Asks the engine, once the call runs."""
    until: int = 0
    """Largest number of tokens that the session may hold in a run."""


class RemoteReplica(Generic[AnswerT]):
    """The part of `specdec.contract.engine_api.Engine` that does not depend on the role. Use from one event loop."""

    is_stalled = False
    """Always False: a question that is not answered in time fails by itself."""

    def __init__(self, info: EngineInfo) -> None:
        """`info` describes the replica without any load."""
        self._info = info
        self._gate: EventLoopGate[RemoteJob] = EventLoopGate(
            NUM_BLOCKS, make_job=RemoteJob, begin=self._begin, may_abandon=lambda job: True, drop=_cancel
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_answers = 0

    async def _ask(self, job: RemoteJob) -> AnswerT:
        """Ask the engine and return the answer; `kv_len` is set afterwards. Raises SpecdecError."""
        raise NotImplementedError

    def _next_of_run(self, job: RemoteJob, answer: AnswerT) -> int | None:
        """Return the token with which a run goes on after a step; None if the call ends with this answer."""
        return None

    async def _wait_changed(self) -> None:
        """Raise Internal once the engine serves another model."""
        raise NotImplementedError

    async def _close_engine(self) -> None:
        """Free what belongs to the engine. Idempotent."""
        raise NotImplementedError

    async def warm_up(self) -> None:
        """Do nothing: the engine has answered questions when it was opened."""

    async def release(self, session_ids: list[str]) -> None:
        """Forget sessions; their calls in flight miss. Idempotent."""
        self._gate.release(session_ids)

    async def end_turns(self, turns: list[EndedTurn]) -> None:
        """Abandon the calls of turns. Idempotent."""
        self._gate.end_turns(turns)

    def info(self) -> EngineInfo:
        """Return the replica's description with its current load."""
        table = self._gate.sessions
        return replace(
            self._info,
            kv_usage=table.num_active_blocks / NUM_BLOCKS,
            num_sessions=table.num_with_kv,
            num_running=table.num_running,
            draining=self._gate.is_closing,
            num_steps=self._num_answers,
        )

    def stats(self) -> EngineStats:
        """Return the state and the counts; see `Engine.stats`."""
        blocks = self._gate.blocks
        return EngineStats(
            num_running_calls=len(self._gate.calls.jobs),
            num_kv_blocks=blocks.num_blocks,
            num_active_kv_blocks=self._gate.sessions.num_active_blocks,
            num_held_kv_blocks=blocks.num_held,
            num_free_kv_blocks=blocks.num_free,
        )

    async def wait_ended(self) -> None:
        """Return once the replica has been closed.

        Raises:
            Internal: the engine serves another model now.
        """
        waits: Sequence[Coroutine[Any, Any, None]] = (self._gate.wait_ended(), self._wait_changed())
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        for task in done:
            task.result()

    async def close(self) -> None:
        """Finish the calls in flight, then free everything. Idempotent."""
        await self._gate.drain()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._close_engine()
        self._gate.end()

    def check_integrity(self) -> None:
        """Check the session table's invariants. Raises RuntimeError if one is violated."""
        self._gate.sessions.check_integrity()

    def _begin(self, job: RemoteJob, now_s: float) -> None:
        job.task = task = asyncio.get_running_loop().create_task(self._run(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, job: RemoteJob) -> None:
        """Answer a call, or the steps of a run, one after another."""
        while (token_id := await self._answer(job)) is not None:
            job.sequence.append(np.array([token_id], dtype=np.uint32))

    async def _answer(self, job: RemoteJob) -> int | None:
        """Ask the engine and give the answer to the callers; return the token with which a run goes on."""
        try:
            outcome: AnswerT | SpecdecError = await self._ask(job)
        except SpecdecError as error:
            outcome = error
        except Exception as error:
            _log.exception("the engine failed: session=%s", job.sequence.session_id)
            outcome = Internal(f"the engine of this replica failed: {type(error).__name__}")
        if not self._gate.is_current(job):
            return None
        self._num_answers += 1
        if isinstance(outcome, SpecdecError):
            self._gate.fail(job, outcome)
            return None
        job.sequence.kv_len = len(job.sequence)
        outcome.kv_len = job.sequence.kv_len
        token_id = self._next_of_run(job, outcome)
        if token_id is None:
            self._gate.finish(job, outcome)
        else:
            self._gate.tell_step(job, outcome)
        return token_id


def _cancel(job: RemoteJob) -> None:
    if job.task is not None:
        job.task.cancel()
