"""Admission: which generation a request starts, joins, resumes or replays; and every generation that runs here.

The front of the coordinator behind gRPC. Not here: protobuf, the checks of a request's own fields (`validation`), a
generation's life (`session`), what the store holds of it (`recovery`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import numpy as np

from coordinator.generation.accounting import Account
from coordinator.generation.commits import CommitQueue
from coordinator.generation.generation import Generation, GenerationParts
from coordinator.generation.lease_keeper import LeaseKeeper
from coordinator.generation.leases import Leases
from coordinator.generation.request_log import (
    LoggedRequest,
    check_expected,
    check_held,
    check_left,
    check_same_request,
    read_logged_request,
    record_of,
)
from coordinator.generation.served_model import on_a_served_model, target_after
from coordinator.generation.stream import OutputStream, Subscription
from coordinator.generation.tails import Tails
from coordinator.replicas.placement import Placement
from coordinator.replicas.pool import ReplicaPools
from coordinator.requests import (
    Finished,
    GenerationIdentity,
    GenerationRequest,
    OutputChunk,
    RequestParameters,
    RequestStats,
)
from coordinator.round.draft_clock import DraftClock
from coordinator.round.gamma import GammaChooser, PoolRecord
from coordinator.round.runner import RoundRunner, RoundSetting
from coordinator.round.tokens import SessionTokens
from coordinator.text.output import OutputStep, OutputWriter
from coordinator.text.prompt import encode_prompt, resolve_sampling
from coordinator.text.text_process import in_thread
from coordinator.text.tokenizer import ServedTokenizer
from specdec.errors import NotFound, ResourceExhausted, SessionBusy, SpecdecError, Unavailable
from specdec.observability.metrics import CoordinatorMetrics
from specdec.state.store import Lease, RequestRecord, SessionRecord, SessionStore
from specdec.types import Mode, TokenIds

#: A session's next request waits this long for the one that runs. Its client may just have left that one: gRPC does not
#: promise to tell of one call's end before another's beginning.
LEAVING_GRACE_S = 0.25

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """The knobs of admission; `config` says what each means."""

    coordinator_id: str
    lease_ttl_s: float
    draft_timeout_s: float | None
    max_running: int


@dataclass(slots=True)
class _Beginning:
    """State a generation starts from, new or resumed."""

    identity: GenerationIdentity
    tokens: SessionTokens
    writer: OutputWriter
    round_id: int
    stats: RequestStats
    began: float
    agreed_len: int
    """Tokens of the session that replicas may hold."""
    is_new_session: bool = False
    replayed: OutputStep | None = None
    """What of the output the log already holds."""


class Generations:
    """Every generation of this coordinator. Used from one event loop."""

    def __init__(
        self,
        settings: GenerationSettings,
        *,
        store: SessionStore,
        pools: ReplicaPools,
        tokenizer: ServedTokenizer,
        metrics: CoordinatorMetrics,
    ) -> None:
        self._settings = settings
        self._store = store
        self._pools = pools
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._commits = CommitQueue(store)
        self._leases = Leases(store, settings.coordinator_id, settings.lease_ttl_s)
        self._tails = Tails(store, self._leases)
        self._lease_keeper = LeaseKeeper(store)
        self._placement = Placement(pools)
        self._pool_records: defaultdict[str, PoolRecord] = defaultdict(PoolRecord)
        self._draft_clocks: defaultdict[str, DraftClock] = defaultdict(DraftClock)
        self._running: dict[str, Generation] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._num_admitting = 0
        self._is_draining = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def open(self, request: GenerationRequest) -> Subscription:
        """Starts, joins, resumes or replays the generation a request means.

        Idempotent by request id within a session. The caller must close the subscription.

        Raises:
            InvalidRequest: CONTEXT_TOO_LONG, NO_CHAT_TEMPLATE, or a request id that means another request.
            NotFound: nothing to resume (SESSION_NOT_FOUND), no such pool (POOL_NOT_FOUND).
            SessionBusy: another request runs on the session.
            SessionLost: the log is shorter than what the caller holds.
            ResourceExhausted: too many requests run (QUEUE_FULL).
            Unavailable: draining, no target replica, or no store.
        """
        began = time.perf_counter()
        session_id = request.session_id or f"s-{secrets.token_hex(12)}"
        lock = self._locks.setdefault(session_id, asyncio.Lock())
        async with lock:
            running = self._running.get(session_id)
            if running is not None and not _is_about(request, running):
                await asyncio.wait([running.task], timeout=LEAVING_GRACE_S)
            if running is not None and (running.is_cancelled or running.stream.is_over):
                await asyncio.wait([running.task])
            elif running is not None:
                return await self._join(running, request)
            self._check_admission()
            self._num_admitting += 1
            self._metrics.request_waiting(+1)
            try:
                return await self._admit(replace(request, session_id=session_id), began)
            finally:
                self._num_admitting -= 1
                self._metrics.request_waiting(-1)

    async def record(self, session_id: str) -> SessionRecord:
        """A session's record. Raises NotFound."""
        record = await self._store.load(session_id)
        if record is None:
            raise _no_session(session_id)
        return record

    async def token_ids(self, session_id: str) -> TokenIds:
        """A session's committed tokens."""
        return await self._store.read_tokens(session_id)

    async def delete(self, session_id: str) -> None:
        """Ends what runs on a session and frees it everywhere. Idempotent."""
        running = self._running.get(session_id)
        if running is not None:
            running.cancel(_no_session(session_id))
            await asyncio.wait([running.task])
        await self._forget(session_id)

    async def drain(self, grace_s: float) -> None:
        """Admits nothing more, lets what runs finish within `grace_s`, then cancels it. Leases are released."""
        self._is_draining = True
        tasks = [generation.task for generation in self._running.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        left = list(self._running.values())
        for generation in left:
            generation.cancel(Unavailable("the coordinator is shutting down", reason="DRAINING"))
        if left:
            await asyncio.wait([generation.task for generation in left])
        await self._lease_keeper.close()

    # ---- admission ---------------------------------------------------------------------------------------------

    def _check_not_draining(self) -> None:
        if self._is_draining:
            raise Unavailable("the coordinator is shutting down", reason="DRAINING")

    def _check_admission(self) -> None:
        self._check_not_draining()
        if len(self._running) + self._num_admitting >= self._settings.max_running:
            raise ResourceExhausted(f"at most {self._settings.max_running} requests run at once")

    async def _join(self, running: Generation, request: GenerationRequest) -> Subscription:
        """Another reader for a running request. What the stream does not keep any more comes from the log."""
        identity = running.stream.identity
        if not _is_about(request, running):
            raise SessionBusy(f"request {identity.request_id} is running on session {identity.session_id}")
        check_same_request(request, identity.request_id, identity.digest)
        num_held = request.resume_from or 0
        check_held(num_held, running.stream.num_tokens)
        if num_held >= running.stream.num_dropped_tokens:
            return running.subscribe(num_held)
        output = (await self._read_log(identity.session_id)).output
        return running.subscribe(num_held, OutputChunk(0, output.token_ids, output.texts, None))

    async def _admit(self, request: GenerationRequest, began: float) -> Subscription:
        record = await self._tails.mend(request.session_id, await self._store.load(request.session_id))
        stored = record.request if record else None
        if request.resume_from is not None and stored is None:
            raise _no_session(request.session_id)
        if stored is not None and (request.resume_from is not None or request.request_id == stored.request_id):
            return await self._resume(stored, request, began)
        if record is not None and record.status == "running":
            raise SessionBusy(f"another request is running on session {request.session_id}")
        return await self._begin(record, request, began)

    async def _begin(self, record: SessionRecord | None, request: GenerationRequest, began: float) -> Subscription:
        """Starts a new turn."""
        session_id = request.session_id
        self._check_serving()
        draft_pool = self._pools.route_draft(request.speculation.draft_pool)
        held = await self._store.read_tokens(session_id) if record else np.empty(0, np.uint32)
        check_expected(request.expected_session_tokens, session_id, len(held) if record else None)
        check_left(request, record)
        max_context_tokens = self._pools.max_context_tokens
        prompt = await in_thread(encode_prompt, request, held, self._tokenizer, max_context_tokens)
        sampling = resolve_sampling(request, prompt, max_context_tokens)
        identity = GenerationIdentity(
            session_id=session_id,
            request_id=request.request_id or f"r-{secrets.token_hex(12)}",
            digest=request.digest,
            turn=record.request.turn + 1 if record and record.request else 0,
            output_start=prompt.num_tokens,
            parameters=RequestParameters(
                sampling,
                replace(request.speculation, draft_pool=draft_pool),
                *target_after(record.request if record else None, self._pools),
            ),
        )
        lease = await self._leases.acquire(session_id, create=record is None)
        is_new = False
        try:
            fresh = await self._store.load(session_id)
            # Another coordinator may have made, run and left the session since it was looked up.
            is_new = fresh is not None and fresh.request is None
            if fresh is None or fresh.request != (record.request if record else None) or fresh.num_tokens != len(held):
                raise SessionBusy(f"session {session_id} has just been changed by another request")
            await self._store.begin_request(
                lease, record_of(identity), keep=prompt.keep, token_ids=prompt.new_token_ids
            )
            self._check_not_draining()
        except BaseException:
            await asyncio.shield(self._give_up(lease, is_new=is_new))
            raise
        beginning = _Beginning(
            identity=identity,
            tokens=SessionTokens([*held[: prompt.keep].tolist(), *prompt.new_token_ids.tolist()]),
            writer=OutputWriter(self._tokenizer, sampling, self._pools.target_info.eos_token_ids),
            round_id=fresh.round_id,
            stats=RequestStats(),
            began=began,
            agreed_len=prompt.keep,
            is_new_session=is_new,
        )
        return self._start(lease, beginning).subscribe(0)

    async def _resume(self, stored: RequestRecord, request: GenerationRequest, began: float) -> Subscription:
        """Replays the session's last request from the log; if it is unfinished, carries on with it."""
        session_id, num_held = request.session_id, request.resume_from or 0
        check_same_request(request, stored.request_id, stored.request_digest)
        if stored.finish_reason is not None:
            logged = await self._read_log(session_id)
            check_held(num_held, len(logged.output.token_ids))
            return _replay(logged, num_held)
        self._check_serving()
        lease = await self._leases.take_over(session_id)
        try:
            logged = await self._read_log(session_id)
            check_held(num_held, len(logged.output.token_ids))
            if logged.finish_reason is not None:
                await self._store.release(lease)
                return _replay(logged, num_held)
            self._check_not_draining()
            logged = await on_a_served_model(logged, lease, self._store, self._pools)
        except BaseException:
            await asyncio.shield(self._give_up(lease, is_new=False))
            raise
        beginning = _Beginning(
            identity=logged.identity,
            tokens=SessionTokens(logged.token_ids),
            writer=logged.writer,
            round_id=logged.round_id,
            stats=logged.stats,
            began=began,
            agreed_len=len(logged.token_ids),
            replayed=logged.output,
        )
        return self._start(lease, beginning).subscribe(num_held)

    def _start(self, lease: Lease, beginning: _Beginning) -> Generation:
        """Starts the task; nothing is awaited, so a lease taken before is always owned by somebody."""
        identity, parameters = beginning.identity, beginning.identity.parameters
        sampling, speculation = parameters.sampling, parameters.speculation
        replicas = self._placement.session(identity.session_id)
        replicas.draft_pool = speculation.draft_pool
        replicas.target_fingerprint = parameters.target_fingerprint
        replicas.settle(beginning.agreed_len, assumed_len=0 if beginning.is_new_session else beginning.agreed_len)
        setting = RoundSetting(
            session_id=identity.session_id,
            epoch=lease.epoch,
            turn=identity.turn,
            output_start=identity.output_start,
            filters=sampling.filters,
            seed=sampling.seed,
            mode=speculation.mode,
            num_logprobs=sampling.num_logprobs,
            vocabulary_size=self._pools.target_info.vocabulary_size,
            draft_timeout_s=self._settings.draft_timeout_s,
        )
        gamma = GammaChooser(
            self._pool_records[speculation.draft_pool],
            fixed=0 if speculation.mode is Mode.OFF else speculation.gamma,
            max_gamma=self._pools.max_gamma,
        )
        parts = GenerationParts(
            store=self._store,
            commits=self._commits,
            lease=lease,
            lease_keeper=self._lease_keeper,
            runner=RoundRunner(setting, beginning.tokens, replicas, gamma, self._draft_clocks[speculation.draft_pool]),
            replicas=replicas,
            tokens=beginning.tokens,
            writer=beginning.writer,
            round_id=beginning.round_id,
            account=Account(identity, beginning.stats, self._metrics, beginning.began),
            on_barren_failure=lambda: self._forget_if(beginning.is_new_session, lease),
        )
        generation = Generation(identity, parts, beginning.replayed)
        self._running[identity.session_id] = generation
        self._metrics.request_running(+1)
        generation.task.add_done_callback(lambda _: self._end(generation, parts))
        return generation

    def _end(self, generation: Generation, parts: GenerationParts) -> None:
        identity = generation.stream.identity
        self._running.pop(identity.session_id, None)
        self._metrics.request_running(-1)
        num_shown = generation.stream.num_tokens
        if num_shown:
            self._tails.remember(
                parts.lease, identity, generation.stream.finish_reason, parts.account.stats,
                parts.tokens, end=identity.output_start + num_shown,
            )  # fmt: skip

    def _check_serving(self) -> None:
        if not self._pools.is_ready:
            raise Unavailable("no target replica can be reached")

    async def _read_log(self, session_id: str) -> LoggedRequest:
        return await read_logged_request(
            self._store, session_id, self._tokenizer, self._pools.target_info.eos_token_ids
        )

    async def _give_up(self, lease: Lease, *, is_new: bool) -> None:
        """Undoes an admission that failed. What cannot be undone now expires by itself."""
        try:
            await self._forget_if(is_new, lease)
            await self._store.release(lease, left=lease.was_left)
        except SpecdecError as error:
            _log.warning("undoing an admission on session %s failed: %s", lease.session_id, error)

    async def _forget_if(self, is_new: bool, lease: Lease) -> None:
        """A session made by a request that failed before its first token is of no use to anybody.

        Raises:
            LeaseLost: another coordinator has taken it over meanwhile; it stays.
        """
        if is_new:
            await self._store.renew(lease)
            await self._forget(lease.session_id)

    async def _forget(self, session_id: str) -> None:
        self._placement.forget(session_id)
        self._tails.forget(session_id)
        await self._store.delete(session_id)
        await self._pools.release(session_id)


def _no_session(session_id: str) -> NotFound:
    return NotFound(f"session_id {session_id!r} is not a session", field="session_id")


def _is_about(request: GenerationRequest, running: Generation) -> bool:
    """Whether a request means what runs, rather than the session's next turn."""
    return request.resume_from is not None or request.request_id == running.stream.identity.request_id


def _replay(logged: LoggedRequest, num_held: int) -> Subscription:
    """A finished request, read again from the log."""
    stream = OutputStream(logged.identity)
    stream.publish(logged.output)
    if logged.finish_reason is not None:
        stream.finish(Finished(logged.finish_reason, logged.identity.output_start, stream.num_tokens, logged.stats))
    return Subscription(stream, num_held, on_close=lambda: None)
