"""Draft and target engines without a model: real calls, positions and batching, modelled times, dialled acceptance.

What they measure is everything around a model. Sessions, rollback, misses and stored answers are the real engine's
(`sessions`); forward passes are waits (`simulated_device`); tokens and distributions are dialled (`simulated_text`).
The network between coordinator and engine can be made slower. The draft engine pre-drafts as docs/protocol.md section 6
says: after its answer the device drafts the likely outcomes, and the next call is a hit if the committed token was
among them.

Not a test double for exactness: filters, logprobs and the prompt's text are ignored. Not here: the numbers
(`simulated_pair`). Built by the services' entry points for `--model simulated:70b-1b`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

import specdec
from specdec.core.limits import check_token_ids
from specdec.core.random import DrawKey
from specdec.engine.base import StepObserver
from specdec.engine.schedule.scheduler import Scheduler
from specdec.engine.sessions.block_manager import BlockManager
from specdec.engine.sessions.request_checks import check_round, digest_of
from specdec.engine.sessions.sequence import Sequence, StoredAnswer
from specdec.engine.sessions.table import SessionTable
from specdec.engine.simulated.device import Branches, ForwardTime, SimulatedDevice, Timeline, Work
from specdec.engine.simulated.pair import SimulatedPair
from specdec.engine.simulated.text import (
    EOS_TOKEN_ID,
    VOCABULARY_SIZE,
    SimulatedText,
    simulated_vocabulary_fingerprint,
)
from specdec.errors import InvalidRequest, KvMiss, ResourceExhausted, StaleEpoch, Unavailable
from specdec.types import (
    BLOCK_TOKENS,
    DistributionRow,
    DrawRule,
    EngineInfo,
    Proposal,
    ProposeRequest,
    SessionPosition,
    TokenIds,
    Verification,
    VerifyRequest,
)

MAX_CONTEXT_TOKENS = 131_072
_NUM_KV_BLOCKS = 65_536

#: From an answer to work that it must not be delayed by: the interpreter runs one thread at a time.
_PAUSE_S = 1e-3

_NO_TOKENS = np.empty(0, dtype=np.uint32)
_NO_PROBABILITIES = np.empty(0, dtype=np.float64)


@dataclass(eq=False, slots=True)
class _Job:
    """A call in flight; on the event loop."""

    sequence: Sequence
    request: ProposeRequest | VerifyRequest
    digest: bytes
    answer: Proposal | Verification
    new_token_ids: TokenIds
    """Draft tokens that have KV once the job is done."""
    arrival_s: float
    work: Work | None = None
    """On the device, from `_submit` on."""
    future: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _SimulatedEngine:
    """What both engines share. Use from one event loop."""

    role: ClassVar[str]
    is_stalled: ClassVar[bool] = False
    """Nothing can hang: no step is really run."""

    def __init__(
        self,
        pair: SimulatedPair,
        *,
        replica_id: str = "local",
        model: str = "",
        pool: str = "default",
        max_gamma: int,
        scheduler: Scheduler | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        """See `specdec.engine.loop.replica.ReplicaOptions`; `scheduler` plans the steps and `observer` is told of
        them."""
        self._pair = pair
        self._max_gamma = max_gamma
        self._blocks = BlockManager(_NUM_KV_BLOCKS)
        self._sessions = SessionTable(self._blocks)
        self._jobs: dict[str, _Job] = {}
        self._timeline = Timeline()
        self._device = SimulatedDevice(self._forward, self._timeline, scheduler or Scheduler(), observer)
        self._is_closing = False
        self._closed = asyncio.Event()
        self._info = EngineInfo(
            version=specdec.__version__,
            role=self.role,
            pool=pool,
            replica_id=replica_id,
            model=model,
            model_fingerprint=f"simulated-{self.role}",
            vocabulary_fingerprint=simulated_vocabulary_fingerprint(),
            vocabulary_size=VOCABULARY_SIZE,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            eos_token_ids=(EOS_TOKEN_ID,),
            max_gamma=max_gamma,
            num_kv_blocks=_NUM_KV_BLOCKS,
            kv_block_tokens=BLOCK_TOKENS,
            kv_usage=0.0,
            num_sessions=0,
            draining=False,
            dtype="none",
            device="simulated",
        )

    @property
    def _forward(self) -> ForwardTime:
        raise NotImplementedError

    def info(self) -> EngineInfo:
        return replace(
            self._info,
            kv_usage=self._blocks.num_held / self._blocks.num_blocks,
            num_sessions=self._sessions.num_with_kv,
            draining=self._is_closing,
        )

    async def warm_up(self) -> None:
        """Nothing is cold."""

    async def release(self, session_ids: list[str]) -> None:
        """Frees sessions' KV; calls in flight on them miss. Idempotent."""
        for session_id in session_ids:
            self._device.forget(session_id)
            self._fail(session_id, KvMiss(f"session {session_id} was released; send from 0 on", have=0))
            self._sessions.release(session_id)

    async def close(self) -> None:
        """Finishes what is in flight, then frees everything. Idempotent."""
        self._is_closing = True
        if self._jobs:
            await asyncio.wait([job.future for job in self._jobs.values()])
        await asyncio.to_thread(self._timeline.end)
        self._sessions.release_all()
        self._closed.set()

    async def wait_ended(self) -> None:
        """Returns once the engine has been closed."""
        await self._closed.wait()

    def check_integrity(self) -> None:
        """Checks the KV books. Raises RuntimeError where they are wrong."""
        self._sessions.check_integrity()

    async def _call(
        self,
        request: ProposeRequest | VerifyRequest,
        draft_token_ids: TokenIds,
        max_kv_len: int,
        start: Callable[[Sequence, float], _Job],
    ) -> Any:
        """Joins, repeats or starts a call. `start` makes the job of a call that passed every gate, and submits it."""
        if self._is_closing:
            raise Unavailable("this replica is draining", reason="DRAINING")
        arrival_s = time.monotonic()
        asked, digest = request.position, digest_of(request)
        sequence = self._sessions.fence(asked)
        job = self._jobs.get(asked.session_id)
        if (asked.epoch, asked.round_id) == (sequence.epoch, sequence.newest_round):
            if job is not None and job.digest == digest:
                return await asyncio.shield(job.future)
            if job is None and sequence.answer is not None and sequence.answer.digest == digest:
                return sequence.answer.value
        self._fail(asked.session_id, StaleEpoch(f"superseded by a newer call of session {asked.session_id}"))
        self._sessions.align(sequence, asked, draft_token_ids)
        try:
            has_room = self._sessions.reserve(sequence, committed_len=asked.committed_len, max_kv_len=max_kv_len)
            if not has_room:
                raise ResourceExhausted("no KV block is left on this replica", reason="KV_EXHAUSTED")
        except ResourceExhausted:
            self._sessions.settle(sequence)
            raise
        job = self._jobs[asked.session_id] = start(sequence, arrival_s)
        # Shielded: whoever waits may go away, and the session must be left in order all the same.
        return await asyncio.shield(job.future)

    def _submit(self, job: _Job, *, after: Callable[[], None] | None = None, **of_work: Any) -> None:
        """Gives a job to the device; `after` is called on its thread once the answer is on its way."""
        event_loop = asyncio.get_running_loop()

        def finish(now_s: float) -> None:
            answered = partial(event_loop.call_soon_threadsafe, self._complete, job)
            self._timeline.at(now_s + self._pair.link_delay_s, lambda _: answered())
            if after is not None:
                self._timeline.at(now_s + self._pair.link_delay_s + _PAUSE_S, lambda _: after())

        asked = job.request.position
        work = Work(
            asked.session_id, context_tokens=asked.committed_len, finish=finish, kv_len=job.sequence.kv_len, **of_work
        )
        job.work = work
        self._device.submit(work, job.arrival_s + self._pair.link_delay_s)

    def _complete(self, job: _Job) -> None:
        session_id = job.sequence.session_id
        if self._jobs.get(session_id) is not job:
            return  # superseded or released meanwhile
        del self._jobs[session_id]
        sequence = job.sequence
        sequence.append(job.new_token_ids)
        sequence.kv_len = len(sequence)
        self._sessions.publish(sequence, job.request.position.committed_len)
        answer = replace(job.answer, kv_len=sequence.kv_len, **self._times(job))
        sequence.answer = StoredAnswer(job.digest, answer)
        self._sessions.settle(sequence)
        job.future.set_result(answer)

    def _times(self, job: _Job) -> dict[str, Any]:
        """What an answer says of its own time."""
        return {"forward_s": time.monotonic() - job.arrival_s}

    def _fail(self, session_id: str, error: Exception) -> None:
        job = self._jobs.pop(session_id, None)
        if job is None:
            return
        self._sessions.settle(job.sequence)
        job.future.set_exception(error)
        job.future.exception()  # whoever waited may be gone; nobody is told twice


class SimulatedDraft(_SimulatedEngine):
    """A `specdec.engine.base.DraftEngine` on a simulated device of its own."""

    role = "draft"

    @property
    def _forward(self) -> ForwardTime:
        return self._pair.draft

    async def propose(self, request: ProposeRequest) -> Proposal:
        """See `DraftEngine.propose`.

        Raises:
            InvalidRequest: the request can never run.
        """
        asked = request.position
        check_round(asked, VOCABULARY_SIZE)
        if not 1 <= request.gamma <= self._max_gamma:
            raise InvalidRequest(f"gamma is {request.gamma}, it must be in 1..{self._max_gamma}", field="gamma")
        gamma = min(request.gamma, MAX_CONTEXT_TOKENS - asked.committed_len)
        proposal: Proposal = await self._call(
            request, _NO_TOKENS, asked.committed_len + gamma - 1, partial(self._start, request, gamma)
        )
        return proposal

    def _start(self, request: ProposeRequest, gamma: int, sequence: Sequence, arrival_s: float) -> _Job:
        asked = request.position
        text = SimulatedText(self._pair.text, asked)
        proposal = _draft(text, asked, gamma, num_cached_tokens=sequence.kv_len)
        job = _Job(sequence, request, digest_of(request), proposal, proposal.draft_token_ids[:-1], arrival_s)
        branches = foresee = None
        if self._pair.predrafts:
            outcomes = range(asked.committed_len + 1, asked.committed_len + gamma + 2)
            branches = Branches(self._pair.num_branches(gamma), gamma + 1, outcomes)
            # What a hit says is worked out as long before as a model would have drafted it.
            foresee = partial(text.foresee, range(outcomes[0], outcomes[-1] + gamma))
        self._submit(
            job,
            after=foresee,
            num_pending=max(1, sequence.num_pending),
            num_steps=gamma,
            is_hit=text.is_predicted(asked.committed_len - 1),
            branches=branches,
        )
        return job


class SimulatedTarget(_SimulatedEngine):
    """A `specdec.engine.base.TargetEngine` on a simulated device of its own."""

    role = "target"

    @property
    def _forward(self) -> ForwardTime:
        return self._pair.target

    async def verify(self, request: VerifyRequest) -> Verification:
        """See `TargetEngine.verify`.

        Raises:
            InvalidRequest: the request can never run, or asks for logprobs, which a simulated target has not.
        """
        asked, num_draft_tokens = request.position, len(request.draft_token_ids)
        check_round(asked, VOCABULARY_SIZE)
        check_token_ids(request.draft_token_ids, VOCABULARY_SIZE, "draft_token_ids")
        num_supports = num_draft_tokens if _draws_distributions(asked) else 0
        if num_draft_tokens > self._max_gamma or len(request.support_ids) != num_supports:
            raise InvalidRequest(
                f"{num_draft_tokens} draft tokens with {len(request.support_ids)} supports; at most {self._max_gamma} "
                f"with {num_supports}",
                field="draft_token_ids",
            )
        if request.num_logprobs is not None:
            raise InvalidRequest("a simulated target has no logprobs", field="num_logprobs")
        num_tokens = asked.committed_len + num_draft_tokens
        verification: Verification = await self._call(
            request, request.draft_token_ids, num_tokens, partial(self._start, request)
        )
        return verification

    def _start(self, request: VerifyRequest, sequence: Sequence, arrival_s: float) -> _Job:
        text = SimulatedText(self._pair.text, request.position)
        verification = _look(text, request, num_cached_tokens=min(sequence.kv_len, request.position.committed_len))
        job = _Job(sequence, request, digest_of(request), verification, _NO_TOKENS, arrival_s)
        num_rows = len(request.draft_token_ids) + 1
        num_tokens = max(num_rows, sequence.num_pending)
        self._submit(job, num_pending=num_tokens, num_logit_rows=num_rows, num_steps=1)
        return job

    def _times(self, job: _Job) -> dict[str, Any]:
        return {} if job.work is None else {"forward_s": job.work.step_s, "step_tokens": job.work.step_tokens}


def _draws_distributions(asked: SessionPosition) -> bool:
    return not asked.filters.is_greedy and asked.draw_rule is DrawRule.DISTRIBUTION


def _draft(text: SimulatedText, asked: SessionPosition, gamma: int, *, num_cached_tokens: int) -> Proposal:
    positions = range(asked.committed_len, asked.committed_len + gamma)
    if _draws_distributions(asked):
        token_ids = [text.draft_draw(index) for index in range(gamma)]
        supports = tuple(text.support(position) for position in positions)
    else:
        token_ids, supports = [text.draft_choice(position) for position in positions], ()
    return Proposal(
        draft_token_ids=np.array(token_ids, dtype=np.uint32),
        supports=supports,
        lost_mass=(0.0,) * len(supports),
        kv_len=0,
        num_cached_tokens=num_cached_tokens,
        forward_s=0.0,
    )


def _look(text: SimulatedText, request: VerifyRequest, *, num_cached_tokens: int) -> Verification:
    asked, num_rows = request.position, len(request.draft_token_ids) + 1
    choices, probabilities = _NO_TOKENS, _NO_PROBABILITIES
    rows: tuple[DistributionRow, ...] = ()
    positions = range(asked.committed_len, asked.committed_len + num_rows)
    if _draws_distributions(asked):
        uniforms = DrawKey(asked.seed, asked.turn, asked.committed_len).tail_uniforms(num_rows - 1)
        looked_through = (*request.support_ids, _NO_TOKENS)
        rows = tuple(map(text.distribution_row, positions, looked_through, uniforms))
    else:
        choices = np.array([text.target_choice(position) for position in positions], dtype=np.uint32)
        probabilities = np.ones(num_rows)
    return Verification(
        choice_token_ids=choices,
        choice_probabilities=probabilities,
        rows=rows,
        logit_rows=(),
        kv_len=0,
        num_cached_tokens=num_cached_tokens,
        forward_s=0.0,
        step_tokens=0,
    )
