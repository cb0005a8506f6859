"""Admission: which generation a request starts, joins, resumes or replays; and every generation that runs here.

From here a request goes to `turn_preparer`, which readies the session's log, then to `factory` and `generation`, which
runs; what comes back is a reader of its `stream`. Not here: protobuf, the checks of a request's own fields
(`front/validation`), what the store holds of a request (`request_log`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from coordinator.generation.generation import Generation, GenerationParts
from coordinator.generation.generation_factory import GenerationFactory
from coordinator.generation.leases import Leases
from coordinator.generation.log_repair import LogRepair
from coordinator.generation.removal import SessionRemoval
from coordinator.generation.request_log import LoggedRequest, check_held, check_same_request
from coordinator.generation.stream import OutputStream, Subscription
from coordinator.generation.turn_preparer import PreparedTurn, TurnPreparer
from coordinator.learning.log import LearningLog
from coordinator.learning.recorder import Recorder
from coordinator.lookup.history import TokenHistory
from coordinator.replicas.placement import Placement
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.prefixes import Prefixes
from coordinator.requests import DraftStats, Finished, GenerationRequest, OutputChunk, RouteStats
from coordinator.round.draft_source_factory import DraftSourceFactory
from coordinator.round.timeline import TimelineLog
from coordinator.routing.promotion import Canary
from coordinator.routing.scoring import ScoreQueue
from coordinator.text.tokenizer import ServedTokenizer
from specdec.errors import NotFound, ResourceExhausted, SessionBusy, SessionLost, Unavailable, Unsupported
from specdec.observability.metrics import CoordinatorMetrics
from specdec.state.store import PrefixDirectory, Promotion, RequestRecord, SessionRecord, SessionStore
from specdec.tenant import DEFAULT_TENANT
from specdec.types import TokenIds

#: A session's next request waits this long for the one that runs. Its client may just have left that one: gRPC does not
#: promise to tell of one call's end before another's beginning.
LEAVING_GRACE_S = 0.25


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """The knobs of admission; `config` says what each means."""

    coordinator_id: str
    lease_ttl_s: float
    draft_timeout_s: float | None
    max_running: int
    tenant: str = DEFAULT_TENANT


class GenerationService:
    """Every generation of this coordinator. Used from one event loop."""

    def __init__(
        self,
        settings: GenerationSettings,
        *,
        store: SessionStore,
        pools: ReplicaPools,
        tokenizer: ServedTokenizer,
        metrics: CoordinatorMetrics,
        directory: PrefixDirectory | None = None,
        history: TokenHistory | None = None,
        scores: ScoreQueue | None = None,
        canary: Canary | None = None,
        learning_log: LearningLog | None = None,
        timelines: TimelineLog | None = None,
    ) -> None:
        """
        Args:
            directory: of the store's tenant; None: sessions are placed by load alone.
            history: of the same tenant, for drafts found in text; None: they look at their own session alone.
            scores: where committed tokens are scored, to route requests among draft models; None: they are not.
            canary: follows the promotion of a draft model, where requests are routed.
            learning_log: where what the target says goes, for drafts to learn from; None: nowhere.
            timelines: where it is noted when rounds did what; None: nowhere.
        """
        self._settings = settings
        self._store = store
        self._metrics = metrics
        leases = Leases(store, settings.coordinator_id, settings.lease_ttl_s)
        placement = Placement(pools)
        self._log_repair = LogRepair(store, leases)
        self._removal = SessionRemoval(store, self._log_repair, placement, pools, settings.tenant)
        self._prefixes = Prefixes(directory)
        self._turn_preparer = TurnPreparer(store, leases, pools, tokenizer, self._removal, self._prefixes,
                                      routes_drafts=scores is not None)  # fmt: skip
        self._draft_kinds = DraftSourceFactory(pools, history, scores, canary, tokenizer.decode)
        self._canary = canary
        self._factory = GenerationFactory(
            store=store, pools=pools, placement=placement, removal=self._removal, prefixes=self._prefixes,
            draft_kinds=self._draft_kinds, metrics=metrics, draft_timeout_s=settings.draft_timeout_s,
            tenant=settings.tenant, recorder=None if learning_log is None else Recorder(learning_log, pools),
            timelines=timelines,
        )  # fmt: skip
        self._running: dict[str, Generation] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._num_admitting = 0
        self._is_draining = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    def draft_stats(self, draft_pool: str) -> DraftStats:
        """What requests have shown here of a draft pool."""
        return self._draft_kinds.draft_stats(draft_pool)

    def route_stats(self, draft_pool: str) -> list[RouteStats]:
        """What is known here of a draft pool for each class of requests."""
        return self._draft_kinds.route_stats(draft_pool)

    @property
    def promotion(self) -> Promotion | None:
        """Of a draft pool, as it stands."""
        return None if self._canary is None else self._canary.promotion

    async def promote(self, draft_pool: str, share: float) -> Promotion | None:
        """Gives sessions a draft pool, up to a share of them; 0 ends what is being promoted.

        Raises:
            Unsupported: requests are not routed here.
            Unavailable: the store cannot be reached.
        """
        if self._canary is None:
            raise Unsupported("this coordinator does not route requests: it runs without --route auto")
        return await self._canary.promote(draft_pool, share)

    async def open(self, request: GenerationRequest) -> Subscription:
        """Starts, joins, resumes or replays the generation a request means.

        Idempotent by request id within a session. The caller must close the subscription.

        Raises:
            InvalidRequest: CONTEXT_TOO_LONG, NO_CHAT_TEMPLATE, a request id that means another request, or a
                resumption beyond the output of a request that has ended.
            NotFound: nothing to resume (SESSION_NOT_FOUND), no such pool (POOL_NOT_FOUND).
            SessionBusy: another request runs on the session.
            SessionLost: the log is shorter than what the caller holds.
            ResourceExhausted: too many requests run (QUEUE_FULL).
            Unavailable: draining, no target replica, or no store.
        """
        began = time.perf_counter()
        session_id = request.session_id or f"s-{secrets.token_hex(12)}"
        lock = self._locks.setdefault(session_id, asyncio.Lock())
        has_waited = False
        while True:
            async with lock:
                running = self._running.get(session_id)
                if running is not None and (running.is_cancelled or running.stream.is_over):
                    await asyncio.wait([running.task])
                    running = None
                if running is None:
                    return await self._admit_counted(replace(request, session_id=session_id), began)
                if has_waited or _is_about(request, running):
                    return await self._join(running, request)
            # Not under the lock: those who read what runs, or end it, need not stand behind those who wait for it.
            await asyncio.wait([running.task], timeout=LEAVING_GRACE_S)
            has_waited = True

    async def _admit_counted(self, request: GenerationRequest, began: float) -> Subscription:
        self._check_admission()
        self._num_admitting += 1
        self._metrics.request_waiting(+1)
        try:
            return await self._admit(request, began)
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
        """Ends what runs on a session here, or is being admitted, and frees it everywhere. Idempotent."""
        lock = self._locks.setdefault(session_id, asyncio.Lock())
        async with lock:
            running = self._running.get(session_id)
            if running is not None:
                running.cancel(_no_session(session_id))
                await asyncio.wait([running.task])
            await self._removal.remove(session_id)

    async def drain(self, grace_s: float) -> None:
        """Admits nothing more, lets what runs finish within `grace_s`, then cancels it. Leases are released."""
        self._is_draining = True
        tasks = [generation.task for generation in self._running.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        left = list(self._running.values())
        for generation in left:
            generation.cancel(_draining())
        if left:
            await asyncio.wait([generation.task for generation in left])
        await self._factory.close()
        await self._prefixes.close()

    # ---- admission ---------------------------------------------------------------------------------------------

    def _check_admission(self) -> None:
        if self._is_draining:
            raise _draining()
        if len(self._running) + self._num_admitting >= self._settings.max_running:
            raise ResourceExhausted(f"at most {self._settings.max_running} requests run at once")

    async def _join(self, running: Generation, request: GenerationRequest) -> Subscription:
        """Another reader for a running request. What the stream no longer keeps comes from the log."""
        identity = running.stream.identity
        if not _is_about(request, running):
            raise SessionBusy(f"request {identity.request_id} is running on session {identity.session_id}")
        check_same_request(request, identity.request_id, identity.digest)
        num_held = request.resume_from or 0
        check_held(num_held, running.stream.num_tokens, has_finished=False)
        if num_held >= running.stream.num_dropped_tokens:
            return running.subscribe(num_held)
        output = (await self._turn_preparer.read_log(identity.session_id, identity.request_id)).output
        return running.subscribe(num_held, OutputChunk(0, output.token_ids, output.texts, None))

    async def _admit(self, request: GenerationRequest, began: float) -> Subscription:
        record = await self._log_repair.repair(request.session_id, await self._store.load(request.session_id))
        stored = record.request if record else None
        if request.resume_from is not None and stored is None:
            raise _nothing_to_resume(request.session_id, request.resume_from)
        if stored is not None and (request.resume_from is not None or request.request_id == stored.request_id):
            return await self._resume(stored, request, began)
        if record is not None and record.status == "running":
            raise SessionBusy(f"another request is running on session {request.session_id}")
        return await self._start(await self._turn_preparer.of_new_turn(record, request, began), 0)

    async def _resume(self, stored: RequestRecord, request: GenerationRequest, began: float) -> Subscription:
        """Replays the session's last request from the log; if it is unfinished, carries on with it."""
        session_id, num_held = request.session_id, request.resume_from or 0
        check_same_request(request, stored.request_id, stored.request_digest)
        if stored.finish_reason is not None:
            logged = await self._turn_preparer.read_log(session_id, stored.request_id)
            check_held(num_held, len(logged.output.token_ids), has_finished=True)
            return _replay(logged, num_held)
        found = await self._turn_preparer.of_unfinished_turn(session_id, stored.request_id, num_held, began)
        return _replay(found, num_held) if isinstance(found, LoggedRequest) else await self._start(found, num_held)

    async def _start(self, beginning: PreparedTurn, num_held: int) -> Subscription:
        """Starts a generation and its first reader, who already holds `num_held` output tokens."""
        if self._is_draining:
            raise await asyncio.shield(self._turn_preparer.give_up(beginning)) or _draining()
        # From here on nothing is awaited: the lease is the generation's, and a drain that begins now finds it.
        generation, parts = self._factory.start(beginning)
        self._running[beginning.identity.session_id] = generation
        self._metrics.request_running(+1)
        generation.task.add_done_callback(lambda _: self._end(generation, parts))
        return generation.subscribe(num_held)

    def _end(self, generation: Generation, parts: GenerationParts) -> None:
        identity = generation.stream.identity
        self._running.pop(identity.session_id, None)
        self._metrics.request_running(-1)
        num_shown = generation.stream.num_tokens
        if num_shown:
            self._log_repair.remember(
                parts.lease, identity, generation.stream.finish_reason, parts.account.stats,
                parts.tokens, end=identity.output_start + num_shown,
            )  # fmt: skip


def _no_session(session_id: str) -> NotFound:
    return NotFound(f"session_id {session_id!r} is not a session", field="session_id")


def _nothing_to_resume(session_id: str, num_held: int) -> NotFound | SessionLost:
    """Whoever holds tokens of a session has seen it."""
    if num_held == 0:
        return _no_session(session_id)
    return SessionLost(
        f"session {session_id} is gone, and with it the output of which {num_held} tokens are held", field="resume_from"
    )


def _draining() -> Unavailable:
    return Unavailable("the coordinator is shutting down", reason="DRAINING")


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
