"""Admission: decides whether a request starts, joins, resumes or replays a generation; holds all running generations.

A request comes from `front/servicer`. It goes to `turn_preparer`, which prepares the session's log, then to
`generation_factory` and `generation`, which runs; the caller gets a reader of the generation's `stream`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakValueDictionary

from coordinator.admission.admission import Admission, AdmissionSettings
from coordinator.admission.slot_request import SlotRequest
from coordinator.admission.slots import RunningSlot
from coordinator.audit.turn_audit import Auditor
from coordinator.generation.generation import CancelCause, Generation
from coordinator.generation.generation_factory import GenerationFactory
from coordinator.generation.interrupted_turns import DEFAULT_RECOVERY_S
from coordinator.generation.log_repair import LogRepair
from coordinator.generation.readers import MAX_READERS, SessionReaders
from coordinator.generation.removal import SessionRemoval
from coordinator.generation.request_log import (
    LoggedRequest,
    check_held,
    check_same_request,
    no_session,
    nothing_to_resume,
)
from coordinator.generation.session_leases import Leases
from coordinator.generation.stream import Subscription
from coordinator.generation.turn import PreparedTurn
from coordinator.generation.turn_preparer import TurnPreparer
from coordinator.learning.log import LearningLog
from coordinator.learning.recorder import Recorder
from coordinator.replicas.placement import Placement
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.prefixes import Prefixes
from coordinator.replicas.target_models import TargetModels
from coordinator.requests import DEFAULT_MAX_NEW_TOKENS, GenerationRequest, OutputChunk
from coordinator.round.draft_source_factory import DraftSourceFactory
from coordinator.text.tokenizer import ServedTokenizer
from specdec.contract.errors import SessionBusy, SpecdecError, Unavailable
from specdec.contract.tenant import SessionKey
from specdec.observability.coordinator_metrics import CoordinatorMetrics
from specdec.state.shared_quotas import SharedQuotas
from specdec.state.store import PrefixDirectory, RequestRecord, SessionStore

#: Time that a session's next request waits for the running one. Its client may have just cancelled the running one:
#: gRPC does not promise to report the end of one call before the start of another.
LEAVING_GRACE_S = 0.25


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """Settings of admission and rounds (see `specdec.settings.coordinator`)."""

    coordinator_id: str
    lease_ttl_s: float
    draft_timeout_s: float | None
    admission: AdmissionSettings
    recovery_s: float = DEFAULT_RECOVERY_S
    """Time in which a turn that an error ended must be resumed, or it counts as failed."""


class GenerationService:
    """All generations of one coordinator, of all tenants. Used from one event loop."""

    def __init__(
        self,
        settings: GenerationSettings,
        *,
        store: SessionStore,
        pools: ReplicaPools,
        target_models: TargetModels,
        tokenizer: ServedTokenizer,
        draft_sources: DraftSourceFactory,
        metrics: CoordinatorMetrics,
        quotas: SharedQuotas,
        directory: PrefixDirectory | None = None,
        learning_log: LearningLog | None = None,
        auditor: Auditor | None = None,
    ) -> None:
        """
        Args:
            settings: settings of admission and rounds.
            store: session store of all tenants.
            pools: replicas that the rounds call.
            target_models: chooses the target model of each turn.
            tokenizer: tokenizer of the target model.
            draft_sources: draft sources of the requests; closed by `drain`.
            metrics: receives counts and times of requests.
            quotas: limits that all coordinators count together; closed by `drain`.
            directory: prefix directory of all tenants; None: sessions are placed by load alone.
            learning_log: receives the target's distributions, for drafts to learn from; closed by `drain`.
            auditor: verifies a share of the rounds again; closed by its owner.
        """
        self._store = store
        self._metrics = metrics
        self._activity = pools.activity
        self.admission = Admission(settings.admission, lambda: sum(r.takes_sessions for r in pools.targets()), quotas)
        leases = Leases(store, settings.coordinator_id, settings.lease_ttl_s)
        self._placement = placement = Placement(pools)
        self._log_repair = LogRepair(store, leases)
        self._removal = SessionRemoval(store, self._log_repair, placement, pools)
        self._prefixes = Prefixes(directory)
        self._turn_preparer = TurnPreparer(
            store,
            leases,
            pools,
            target_models,
            tokenizer,
            self._removal,
            self._prefixes,
            routes_drafts=draft_sources.is_routing,
        )
        self._factory = GenerationFactory(
            store=store,
            pools=pools,
            placement=placement,
            removal=self._removal,
            prefixes=self._prefixes,
            draft_sources=draft_sources,
            metrics=metrics,
            draft_timeout_s=settings.draft_timeout_s,
            kv_wait_s=settings.admission.max_wait_s,
            recovery_s=settings.recovery_s,
            tokenizer=tokenizer,
            recorder=None if learning_log is None else Recorder(learning_log, pools),
            auditor=auditor,
        )
        metrics.set_capacity(settings.admission.max_queue)
        metrics.watch_queue(lambda: self.admission.queue_state)
        metrics.watch_replicas(
            lambda: [(each.role, each.pool, each.state) for each in pools.addressed_replicas()],
            pools.draft_pools,
            pools.num_faults.copy,
        )
        self._running: dict[SessionKey, Generation] = {}
        self._readers = SessionReaders(self.admission.note_readers)
        self._locks: WeakValueDictionary[SessionKey, asyncio.Lock] = WeakValueDictionary()
        self._is_draining = False
        self.is_leaving = False
        """Set while new requests are refused with DRAINING and running ones go on."""
        #: Id of this process, which is new at every start.
        self.coordinator_id = settings.coordinator_id

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def open(self, request: GenerationRequest) -> Subscription:
        """Start, join, resume or replay the generation that a request asks for.

        Idempotent by request id within a session. The caller must close the subscription.

        Raises:
            InvalidRequest: CONTEXT_TOO_LONG, NO_CHAT_TEMPLATE, a request id that was used for another request, or a
                resumption beyond the output of a request that has ended.
            NotFound: there is nothing to resume (SESSION_NOT_FOUND), or the pool does not exist (POOL_NOT_FOUND).
            SessionBusy: another request runs on the session.
            SessionLost: the log is shorter than what the caller holds.
            ResourceExhausted: too many requests run, or the deadline is too near (QUEUE_FULL).
            Unavailable: the coordinator drains, or no target replica or no store can be reached.
        """
        began = time.perf_counter()
        self._activity.begin()
        request = replace(request, session_id=request.session_id or f"s-{secrets.token_hex(12)}")
        lock = self._locks.setdefault(request.key, asyncio.Lock())
        slot: RunningSlot | None = None
        has_waited = False
        try:
            while True:
                async with lock:
                    running = self._running.get(request.key)
                    if running is not None and (running.is_cancelled or running.stream.is_over):
                        await asyncio.wait([running.task])
                        running = None
                    if running is None and slot is not None:
                        return self._readers.add(request.key, await self._admit_counted(request, began, slot))
                    if running is not None and (has_waited or _is_about(request, running)):
                        reader = await self._join(running, request)
                        return self._readers.add(request.key, reader, self._max_readers(request.key))
                if running is None and self.is_leaving:
                    raise _draining()
                # Waits without the lock, so that readers of the running request, and its deletion, are not held up.
                if running is None:
                    slot = await self.admission.enter(self._slot_request(request))
                else:
                    await asyncio.wait([running.task], timeout=LEAVING_GRACE_S)
                    has_waited = True
        finally:
            self._activity.end()
            if slot is not None and not slot.is_handed_on:
                slot.release()

    def count_refusal(self, error: SpecdecError) -> None:
        """Count a request that ended with an error before it was opened."""
        self._metrics.observe_refused(error.reason)

    def count_constrained(self, kind: str, compile_s: float | None) -> None:
        """Count a request with a constraint; see `CoordinatorMetrics.observe_constrained`."""
        self._metrics.observe_constrained(kind, compile_s)

    def count_client_wait(self, seconds: float) -> None:
        """Count a wait until a client's stream took an event."""
        self._metrics.rounds.observe_client_wait(seconds)

    async def delete(self, key: SessionKey) -> None:
        """End the session's generation or admission here, and remove the session everywhere. Idempotent.

        Raises Unavailable if the store cannot be reached.
        """
        lock = self._locks.setdefault(key, asyncio.Lock())
        self.admission.withdraw(key, lambda: no_session(key.session_id))
        async with lock:
            running = self._running.get(key)
            if running is not None:
                running.cancel(no_session(key.session_id), CancelCause.SESSION_DELETED)
                await asyncio.wait([running.task])
            await self._removal.remove(key)
        self.admission.quotas.forget_session(key)

    async def drain(self, grace_s: float) -> None:
        """Stop admission, let generations finish within `grace_s`, then cancel the others. All leases are released."""
        self._is_draining = True
        self.admission.close(_draining)
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
        await self.admission.close_quotas()

    # ---- admission ---------------------------------------------------------------------------------------------

    def _slot_request(self, request: GenerationRequest) -> SlotRequest:
        sampling = request.sampling
        most = sampling.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
        may_stop = not sampling.ignore_eos or sampling.stop or sampling.stop_token_ids
        return SlotRequest(
            request.key,
            most,
            min_new_tokens=min(sampling.filters.min_new_tokens, most) if may_stop else most,
            priority=request.priority,
            is_next_turn=self._placement.knows(request.key),
            is_resumption=request.resume_from is not None,
            deadline_s=request.deadline_s,
        )

    async def _admit_counted(self, request: GenerationRequest, began: float, slot: RunningSlot) -> Subscription:
        if self._is_draining:
            raise _draining()
        self._metrics.request_admitting(+1)
        try:
            return await self._admit(request, began, slot)
        finally:
            self._metrics.request_admitting(-1)

    async def _join(self, running: Generation, request: GenerationRequest) -> Subscription:
        """Add a reader to a running request. Tokens that the stream no longer holds are read from the log."""
        identity = running.turn.identity
        if not _is_about(request, running):
            raise SessionBusy(f"request {identity.request_id} is running on session {identity.session_id}")
        check_same_request(request, identity.request_id, identity.digest)
        num_held = request.resume_from or 0
        check_held(num_held, running.stream.num_tokens, has_finished=False)
        if num_held >= running.stream.num_dropped_tokens:
            return running.subscribe(num_held)
        output = (await self._turn_preparer.read_log(request.key, identity.request_id)).output
        return running.subscribe(num_held, OutputChunk(0, output.token_ids, output.texts, None, output.parts))

    def _max_readers(self, key: SessionKey) -> int:
        """Return how many readers a running request may have, with one that joins it.

        A tenant at its limit of streams gets no further one: the newest reader takes the place of the oldest.
        """
        return self._readers.num_of(key) if self.admission.has_all_streams(key.tenant) else MAX_READERS

    async def _admit(self, request: GenerationRequest, began: float, slot: RunningSlot) -> Subscription:
        loaded = await self._store.of_tenant(request.tenant).load(request.session_id)
        record = await self._log_repair.repair(request.key, loaded)
        stored = record.request if record else None
        if request.resume_from is not None and stored is None:
            raise nothing_to_resume(request.session_id, request.resume_from)
        if stored is not None and (request.resume_from is not None or request.request_id == stored.request_id):
            return await self._resume(stored, request, began, slot)
        if record is not None and record.status == "running":
            raise SessionBusy(f"another request is running on session {request.session_id}")
        quotas = self.admission.quotas
        quotas.use_session(request.key, is_new=record is None)
        try:
            prepared = await self._turn_preparer.of_new_turn(
                record, request, began, partial(self.admission.begin_tokens, slot)
            )
        except BaseException:
            if record is None:
                quotas.forget_session(request.key)
            raise
        self.admission.count_tokens(request.tenant, prepared.turn.identity.output_start - prepared.agreed_len)
        return await self._start(prepared, 0, slot)

    async def _resume(
        self, stored: RequestRecord, request: GenerationRequest, began: float, slot: RunningSlot
    ) -> Subscription:
        """Replay the session's last request from the log, and continue it if it is unfinished."""
        key, num_held = request.key, request.resume_from or 0
        check_same_request(request, stored.request_id, stored.request_digest)
        if stored.finish_reason is not None:
            if (reader := self._readers.replay_again(key, stored, num_held)) is not None:
                return reader
            logged = await self._turn_preparer.read_log(key, stored.request_id)
            check_held(num_held, len(logged.output.token_ids), has_finished=True)
            return self._readers.replay(key, logged, num_held)
        resumed = await self._turn_preparer.of_unfinished_turn(key, stored.request_id, num_held, began)
        if isinstance(resumed, LoggedRequest):
            return self._readers.replay(key, resumed, num_held)
        self._metrics.observe_resumed()
        identity = resumed.turn.identity
        num_most_tokens = identity.output_start + identity.parameters.sampling.max_new_tokens
        self.admission.reserve_tokens(slot, num_most_tokens)
        return await self._start(resumed, num_held, slot)

    async def _start(self, prepared: PreparedTurn, num_held: int, slot: RunningSlot) -> Subscription:
        """Start a generation; return its first reader, which already holds `num_held` output tokens."""
        if self._is_draining:
            raise await asyncio.shield(self._turn_preparer.give_up(prepared)) or _draining()
        # Nothing is awaited from here on: the generation owns the lease, and a drain that starts now finds it.
        generation = self._factory.start(prepared, slot)
        slot.hand_on()
        self._running[generation.turn.lease.key] = generation
        self._metrics.request_running(+1)
        self.admission.note_readers(generation.turn.lease.key.tenant, -1)
        self._activity.begin()
        generation.task.add_done_callback(lambda _: self._forget(generation, slot))
        return generation.subscribe(num_held)

    def _forget(self, generation: Generation, slot: RunningSlot) -> None:
        self._running.pop(generation.turn.lease.key, None)
        slot.release()
        self._metrics.request_running(-1)
        self.admission.note_readers(generation.turn.lease.key.tenant, +1)
        self._activity.end()
        stream = generation.stream
        if stream.num_tokens:
            self._log_repair.remember(generation.turn, stream.finish_reason, generation.stats, stream.num_tokens)


def _draining() -> Unavailable:
    return Unavailable("the coordinator is shutting down", reason="DRAINING")


def _is_about(request: GenerationRequest, running: Generation) -> bool:
    """Return whether a request asks for the running generation, and not for the session's next turn."""
    return request.resume_from is not None or request.request_id == running.turn.identity.request_id
