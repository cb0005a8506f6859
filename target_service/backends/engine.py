"""A target replica in front of the backend that the settings name.

A checked round becomes a question to the backend about the distributions of its positions, with the masks of its
constraint, and `wire_rows` makes the answer of them. `specdec.engine.remote.remote_replica` has the part that drafts of
other engines share. Called by the target service's servicer.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Protocol, cast

import numpy as np

from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import Internal, NotFound, Unsupported
from specdec.contract.types import (
    BLOCK_TOKENS,
    DistributionRow,
    LogitRow,
    Score,
    ScoreRequest,
    SessionPosition,
    TokenIds,
    Verification,
    VerifyRequest,
)
from specdec.contract.version import __version__
from specdec.engine.remote.http_connection import open_remote
from specdec.engine.remote.remote_replica import NUM_BLOCKS, RemoteJob, RemoteReplica
from specdec.engine.sessions.calls import Call, identity_of
from specdec.engine.sessions.concurrent_rounds import ConcurrentRounds, OtherAnswers
from specdec.observability.engine_metrics import EngineMetrics
from specdec.settings.adapter_specs import parse_adapters
from specdec.settings.target import TargetSettings
from specdec.structured.known_constraints import KnownConstraints
from specdec.structured.mask_threads import MaskRequest, MasksInWork, MaskThreads, SessionMatcher
from target_service.backends.contract import Answer, Backend, RowsRequest
from target_service.backends.server import open_server
from target_service.backends.vllm_backend import open_vllm
from target_service.backends.wire_rows import choices, distribution_rows, logit_rows

_NO_TOKENS: TokenIds = np.empty(0, dtype=np.uint32)


class BackendObserver(Protocol):
    """Observer of answered questions. Called from the event loop."""

    def observe_step(self, *, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Record a question as a step of the engine: `seconds` is the time until its answer."""
        ...

    def observe_queue(self, seconds: float) -> None:
        """Record that a call waited `seconds` before its question was asked."""
        ...

    def observe_masks(self, seconds: float) -> None:
        """Record the time that the masks of a call took. Called from any thread."""
        ...

    def observe_backend(self, *, num_rows: int, num_reasked: int, num_lost: int) -> None:
        """Record the positions of a question; see `Answer`."""
        ...


class BackendTarget(RemoteReplica[Verification]):
    """A `specdec.contract.engine_api.TargetEngine` in front of a backend. Use from one event loop."""

    def __init__(
        self,
        backend: Backend,
        *,
        replica_id: str = "local",
        model: str = "",
        pool: str = "default",
        max_gamma: int = 16,
        max_run: int = 0,
        observer: BackendObserver | None = None,
        constraints: KnownConstraints | None = None,
    ) -> None:
        """See `specdec.engine.loop.replica_engine.ReplicaOptions`.

        `observer` gets each answered request as a step. `constraints` are those that requests may have; None if they
        may have none, as with a backend that does not know whole rows of logits.
        """
        shape = backend.shape
        super().__init__(
            EngineInfo(
                version=__version__,
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
                num_kv_blocks=NUM_BLOCKS,
                kv_block_tokens=BLOCK_TOKENS,
                kv_usage=0.0,
                num_sessions=0,
                draining=False,
                dtype="engine",
                device=shape.engine,
                backend=shape.backend,
                unsupported_fields=shape.unsupported_fields,
                max_run=max_run,
                supports_constraints=constraints is not None,
            )
        )
        self._constraints = constraints
        observe = None if observer is None else observer.observe_masks
        self._masks = None if constraints is None else MaskThreads(constraints, observe)
        self._backend = backend
        self._observer = observer
        self._answers = ConcurrentRounds()

    def info(self) -> EngineInfo:
        """Return the replica's description with its current load and adapters."""
        adapters = self._backend.adapters
        return replace(
            super().info(), adapter_names=tuple(adapters.values()), adapter_fingerprints=tuple(adapters.keys())
        )

    async def verify(
        self, request: VerifyRequest, on_step: Callable[[Verification], None] | None = None
    ) -> Verification:
        """Return p at every draft position and one beyond; see `TargetEngine.verify`."""
        if request.position.filters.constraint_id and self._constraints is None:
            raise Unsupported(
                f"a target with the backend {self._info.backend} cannot follow constraints", field="constraint"
            )
        num_draft_tokens = len(request.draft_token_ids)
        if request.model and request.model not in self._backend.adapters:
            raise NotFound("the engine does not have this adapter any more", reason="MODEL_NOT_FOUND", field="adapter")
        call = Call(
            request,
            identity_of(request),
            request.draft_token_ids,
            num_logit_rows=num_draft_tokens + 1,
            max_kv_len=request.position.committed_len + num_draft_tokens,
            run=None if on_step is None or not self._info.max_run else request.run,
            constraint=None if self._constraints is None else await self._constraints.constraint_of(request.position),
        )
        return cast(Verification, await self._gate.call(call, on_step))

    def renew(self, position: SessionPosition, until: int, committed_len: int) -> None:
        """Raise the limit of a run; see `TargetEngine.renew`."""
        job = self._gate.calls.jobs.get(position.session_id)
        if job is not None and job.call.position is position and committed_len <= len(job.sequence):
            job.until = max(job.until, self._limit(until, committed_len))

    async def score(self, request: ScoreRequest) -> Score:
        """Raise Unsupported: the backend has no draft."""
        raise Unsupported(f"a target with the backend {self._info.backend} has no local drafts to score with")

    async def release(self, session_ids: list[str]) -> None:
        """Forget sessions; their calls in flight miss. Idempotent."""
        await super().release(session_ids)
        self._backend.forget(session_ids)

    async def _wait_changed(self) -> None:
        await self._backend.wait_changed()

    async def _close_engine(self) -> None:
        if self._masks is not None:
            self._masks.close()
        await self._backend.close()

    async def _ask(self, job: RemoteJob) -> Verification:
        request, began_s = _step_of(job), time.monotonic()
        token_ids = job.sequence.token_ids.copy()
        masks = self._begin_masks(job, request.position, token_ids)
        answer = await self._backend.ask(
            RowsRequest(
                request.position, token_ids, job.call.num_logit_rows, request.num_logprobs, request.model, masks
            )
        )
        return self._verification(job, request, answer, time.monotonic() - began_s)

    def _next_of_run(self, job: RemoteJob, answer: Verification) -> int | None:
        """See `RemoteReplica._next_of_run`; a run ends at its limit, with an end token, and without a block."""
        run, sequence = job.call.run, job.sequence
        if run is None:
            return None
        token_id = answer.rows[0].tail_token_id if answer.rows else int(answer.choice_token_ids[0])
        length = len(sequence) + 1
        until = max(job.until, self._limit(run.until, job.call.position.committed_len))
        self._gate.calls.make_room(job)
        if length >= until or token_id in run.end_token_ids or length > len(sequence.block_table) * BLOCK_TOKENS:
            return None
        return token_id

    def _limit(self, until: int, committed_len: int) -> int:
        """Return how many tokens a run may hold that was asked to go on until then."""
        return min(until, committed_len + self._info.max_run, self._info.max_context_tokens)

    def _begin_masks(self, job: RemoteJob, position: SessionPosition, token_ids: TokenIds) -> MasksInWork | None:
        """Begin the masks of a step, beside the engine's work; None if the call has no constraint."""
        constraint = job.call.constraint
        if self._masks is None or constraint is None:
            return None
        session = job.sequence.matcher = job.sequence.matcher or SessionMatcher()
        return self._masks.begin(
            session,
            MaskRequest(
                constraint,
                position.filters.constraint_id,
                token_ids[position.output_start : position.committed_len],
                token_ids[position.committed_len :].tolist(),
                position.filters.end_token_ids,
            ),
        )

    def _verification(self, job: RemoteJob, request: VerifyRequest, answer: Answer, answer_s: float) -> Verification:
        if len(answer.distributions) != job.call.num_logit_rows:
            raise Internal(f"the backend {self._info.backend} answered {len(answer.distributions)} distributions")
        if any(distribution.token_ids[-1] >= self._info.vocabulary_size for distribution in answer.distributions):
            raise Internal(f"the backend {self._info.backend} answered a token that the vocabulary does not have")
        self._note_answer(job, answer, answer_s)
        others = self._others(job)
        rows: tuple[DistributionRow, ...] = ()
        token_ids, probabilities = _NO_TOKENS, np.empty(0)
        if request.position.carries_distributions:
            rows = distribution_rows(answer.distributions, request)
        else:
            token_ids, probabilities = choices(answer.distributions, request.position)
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

    def _others(self, job: RemoteJob) -> OtherAnswers:
        """Count the answer of a job; return those to other sessions since its last."""
        if job.call.run is not None:
            self._answers.pass_over(job.sequence)
            return OtherAnswers()
        num_runs = sum(each.call.run is not None for each in self._gate.calls.running)
        return self._answers.note(job.sequence, job.call.num_logit_rows, num_runs)

    def _note_answer(self, job: RemoteJob, answer: Answer, answer_s: float) -> None:
        if self._observer is None:
            return
        num_rows = job.call.num_logit_rows
        self._observer.observe_queue(max(0.0, time.monotonic() - answer_s - job.arrival_s))
        self._observer.observe_step(num_sequences=1, num_tokens=num_rows, seconds=answer_s)
        self._observer.observe_backend(
            num_rows=num_rows, num_reasked=answer.num_reasked_rows, num_lost=answer.num_lost_rows
        )


def _step_of(job: RemoteJob) -> VerifyRequest:
    """Return the request of the job's next step: in a run, all tokens so far are before it."""
    request = cast(VerifyRequest, job.call.request)
    if len(job.sequence) == request.position.committed_len + len(request.draft_token_ids):
        return request
    return replace(request, position=replace(request.position, start=len(job.sequence), token_ids=_NO_TOKENS))


def _logits(
    answer: Answer, request: VerifyRequest, rows: tuple[DistributionRow, ...], choice_token_ids: TokenIds
) -> tuple[LogitRow, ...]:
    if request.num_logprobs is None:
        return ()
    tail_ids = [row.tail_token_id for row in rows] or choice_token_ids.tolist()
    return logit_rows(answer.distributions, request.support_ids, tail_ids, request.num_logprobs)


#: Backends that reach their engine over HTTP.
_OPEN: Mapping[str, Callable[..., Awaitable[Backend]]] = {"server": open_server, "vllm": open_vllm}


async def open_backend_target(
    settings: TargetSettings, replica_id: str, metrics: EngineMetrics, environ: Mapping[str, str]
) -> BackendTarget:
    """Connect to the engine that the settings name, check it, and return a target replica in front of it.

    Raises:
        InvalidRequest: a setting does not fit the engine; the message names the flag to change.
        Unavailable: the engine's server cannot be reached.
    """
    if settings.backend == "llama-cpp":
        backend = _open_llama(settings)
    else:
        adapters = parse_adapters(settings.adapter)
        backend = await open_remote(settings, environ, partial(_OPEN[settings.backend], adapters=adapters))
    return BackendTarget(
        backend,
        replica_id=replica_id,
        model=settings.model,
        pool=settings.pool,
        max_gamma=settings.max_gamma,
        max_run=settings.max_run if backend.shape.has_whole_rows else 0,
        observer=metrics,
        constraints=_known_constraints(settings, backend) if find_spec("llguidance") else None,
    )


def _known_constraints(settings: TargetSettings, backend: Backend) -> KnownConstraints | None:
    """Return the constraints on the model's tokens; None for a backend that follows none."""
    shape = backend.shape
    if not shape.has_whole_rows:
        return None
    return KnownConstraints(settings.model, shape.eos_token_ids, shape.vocabulary_size, shape.vocabulary_fingerprint)


def _open_llama(settings: TargetSettings) -> Backend:
    from target_service.backends.llama_cpp import open_llama

    return open_llama(
        model=settings.model, max_context_tokens=settings.max_context_tokens, num_threads=settings.num_threads
    )
