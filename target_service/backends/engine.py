"""A target replica in front of a backend: sessions and idempotency here, the model elsewhere.

A checked round passes the gate and the session table of the event loop (`specdec.engine.sessions.event_loop_gate`),
which know the session's tokens. The backend is asked for the laws of the positions, and `laws` makes the answer of
them. The engine behind the backend batches the questions of all sessions itself. Called by the target service's
servicer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np

import specdec
from specdec.engine.sessions.calls import Call
from specdec.engine.sessions.concurrent_rounds import ConcurrentRounds
from specdec.engine.sessions.event_loop_gate import EventLoopGate
from specdec.engine.sessions.request_checks import digest_of
from specdec.engine.sessions.sequence import Sequence
from specdec.engine_api import EndedTurn, EngineStats
from specdec.errors import Internal, SpecdecError, Unsupported
from specdec.types import (
    BLOCK_TOKENS,
    DistributionRow,
    EngineInfo,
    LogitRow,
    Score,
    ScoreRequest,
    TokenIds,
    Verification,
    VerifyRequest,
)
from target_service.backends.contract import Answer, Backend, Question
from target_service.backends.laws import choices, distribution_rows, logit_rows
from target_service.request_checks import VerifyLimits, check_verify

#: Number of blocks of tokens that sessions may have here: 1 million tokens, 4 bytes each.
_NUM_BLOCKS = 65_536

_NO_TOKENS: TokenIds = np.empty(0, dtype=np.uint32)

_log = logging.getLogger(__name__)


class BackendObserver(Protocol):
    """Observer of answered questions. Called from the event loop."""

    def observe_step(self, *, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Record a question as a step of the engine: `seconds` is the time until its answer."""
        ...

    def observe_queue(self, seconds: float) -> None:
        """Record that a call waited `seconds` before its question was asked."""
        ...

    def observe_backend(self, *, num_rows: int, num_reasked: int, num_lost: int) -> None:
        """Record the positions of a question; see `Answer`."""
        ...


@dataclass(eq=False, slots=True)
class _Job:
    """A call in progress."""

    call: Call
    sequence: Sequence
    arrival_s: float
    num_cached_tokens: int = 0
    task: asyncio.Task[None] | None = None
    """Asks the backend, once the call runs."""

    @property
    def request(self) -> VerifyRequest:
        return cast(VerifyRequest, self.call.request)


class BackendTarget:
    """A `specdec.engine_api.TargetEngine` in front of a backend. Use from one event loop."""

    is_stalled = False
    """Always False: a question that is not answered in time fails by itself."""

    def __init__(
        self,
        backend: Backend,
        *,
        replica_id: str = "local",
        model: str = "",
        pool: str = "default",
        max_gamma: int = 16,
        observer: BackendObserver | None = None,
    ) -> None:
        """See `specdec.engine.loop.replica.ReplicaOptions`; `observer` receives every answered question as a step."""
        self._backend = backend
        self._observer = observer
        self._limits = VerifyLimits(backend.shape.vocabulary_size, backend.shape.max_context_tokens, max_gamma)
        self._gate: EventLoopGate[_Job] = EventLoopGate(
            _NUM_BLOCKS, make_job=_Job, begin=self._begin, may_abandon=lambda job: True, drop=_cancel
        )
        self._answers = ConcurrentRounds()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_answers = 0
        shape = backend.shape
        self._info = EngineInfo(
            version=specdec.__version__,
            role="target",
            pool=pool,
            replica_id=replica_id,
            model=model,
            model_fingerprint=shape.model_fingerprint,
            vocabulary_fingerprint=shape.vocabulary_fingerprint,
            vocabulary_size=shape.vocabulary_size,
            max_context_tokens=shape.max_context_tokens,
            eos_token_ids=shape.eos_token_ids,
            max_gamma=max_gamma,
            num_kv_blocks=_NUM_BLOCKS,
            kv_block_tokens=BLOCK_TOKENS,
            kv_usage=0.0,
            num_sessions=0,
            draining=False,
            dtype="engine",
            device=shape.engine,
            backend=shape.backend,
            unsupported_fields=shape.unsupported_fields,
        )

    async def verify(self, request: VerifyRequest) -> Verification:
        """Return p at every draft position and one beyond; see `TargetEngine.verify`.

        Raises:
            InvalidRequest: the request can never run; nothing of it is stored.
        """
        check_verify(request, self._limits)
        num_draft_tokens = len(request.draft_token_ids)
        call = Call(
            request,
            digest_of(request),
            request.draft_token_ids,
            num_logit_rows=num_draft_tokens + 1,
            max_kv_len=request.position.committed_len + num_draft_tokens,
        )
        return cast(Verification, await self._gate.call(call))

    async def score(self, request: ScoreRequest) -> Score:
        """Raise Unsupported: the backend has no draft."""
        raise Unsupported(f"a target with the backend {self._info.backend} has no local drafts to score with")

    async def warm_up(self) -> None:
        """Do nothing: the engine has answered the questions of the backend's own checks."""

    async def release(self, session_ids: list[str]) -> None:
        """Forget sessions; their calls in flight miss. Idempotent."""
        self._gate.release(session_ids)
        self._backend.forget(session_ids)

    async def end_turns(self, turns: list[EndedTurn]) -> None:
        """Abandon the calls of turns. Idempotent."""
        self._gate.end_turns(turns)

    def info(self) -> EngineInfo:
        """Return the replica's description with its current load."""
        sessions = self._gate.sessions
        return replace(
            self._info,
            kv_usage=sessions.num_active_blocks / _NUM_BLOCKS,
            num_sessions=sessions.num_with_kv,
            num_running=sessions.num_running,
            draining=self._gate.is_closing,
            num_steps=self._num_answers,
        )

    def stats(self) -> EngineStats:
        """Return the state and the counts; see `Engine.stats`."""
        blocks, sessions = self._gate.blocks, self._gate.sessions
        return EngineStats(
            num_running_calls=len(self._gate.calls.jobs),
            num_kv_blocks=blocks.num_blocks,
            num_active_kv_blocks=sessions.num_active_blocks,
            num_held_kv_blocks=blocks.num_held,
            num_free_kv_blocks=blocks.num_free,
        )

    async def wait_ended(self) -> None:
        """Return once the engine has been closed.

        Raises:
            Internal: the engine behind the backend serves another model now.
        """
        waits: list[Coroutine[Any, Any, None]] = [self._gate.wait_ended(), self._backend.wait_changed()]
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
        await self._backend.close()
        self._gate.end()

    def check_integrity(self) -> None:
        """Check the session table's invariants. Raises RuntimeError if one is violated."""
        self._gate.sessions.check_integrity()

    def _begin(self, job: _Job, now_s: float) -> None:
        job.task = task = asyncio.get_running_loop().create_task(self._run(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, job: _Job) -> None:
        request, began_s = job.request, time.monotonic()
        try:
            token_ids = job.sequence.token_ids.copy()
            answer = await self._backend.ask(
                Question(request.position, token_ids, job.call.num_logit_rows, request.num_logprobs)
            )
            outcome: Verification | SpecdecError = self._verification(job, answer, time.monotonic() - began_s)
        except SpecdecError as error:
            outcome = error
        except Exception as error:
            _log.exception("the backend failed: session=%s", request.position.session_id)
            outcome = Internal(f"the backend {self._info.backend} failed: {type(error).__name__}")
        if not self._gate.is_current(job):
            return
        if isinstance(outcome, SpecdecError):
            self._gate.fail(job, outcome)
            return
        job.sequence.kv_len = len(job.sequence)
        outcome.kv_len = job.sequence.kv_len
        self._gate.finish(job, outcome)

    def _verification(self, job: _Job, answer: Answer, answer_s: float) -> Verification:
        request = job.request
        if len(answer.laws) != job.call.num_logit_rows:
            raise Internal(f"the backend {self._info.backend} answered {len(answer.laws)} laws")
        self._note_answer(job, answer, answer_s)
        others = self._answers.note(job.sequence, job.call.num_logit_rows)
        rows: tuple[DistributionRow, ...] = ()
        token_ids, probabilities = _NO_TOKENS, np.empty(0)
        if request.position.carries_distributions:
            rows = distribution_rows(answer.laws, request)
        else:
            token_ids, probabilities = choices(answer.laws, request.position)
        return Verification(
            choice_token_ids=token_ids,
            choice_probabilities=probabilities,
            rows=rows,
            logit_rows=_logits(answer, request, rows, token_ids),
            kv_len=0,
            num_cached_tokens=min(answer.num_cached_tokens, request.position.committed_len),
            forward_s=answer_s,
            step_tokens=max(1, len(job.sequence) - answer.num_cached_tokens),
            num_concurrent=others.num_rounds,
            num_other_rows=others.num_rows,
        )

    def _note_answer(self, job: _Job, answer: Answer, answer_s: float) -> None:
        self._num_answers += 1
        if self._observer is None:
            return
        num_rows = job.call.num_logit_rows
        self._observer.observe_queue(max(0.0, time.monotonic() - answer_s - job.arrival_s))
        self._observer.observe_step(num_sequences=1, num_tokens=num_rows, seconds=answer_s)
        self._observer.observe_backend(
            num_rows=num_rows, num_reasked=answer.num_reasked_rows, num_lost=answer.num_lost_rows
        )


def _cancel(job: _Job) -> None:
    if job.task is not None:
        job.task.cancel()


def _logits(
    answer: Answer, request: VerifyRequest, rows: tuple[DistributionRow, ...], choice_token_ids: TokenIds
) -> tuple[LogitRow, ...]:
    if request.num_logprobs is None:
        return ()
    tail_ids = [row.tail_token_id for row in rows] or choice_token_ids.tolist()
    return logit_rows(answer.laws, request.support_ids, tail_ids, request.num_logprobs)
