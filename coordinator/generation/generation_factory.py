"""Builds a generation from a prepared turn, and holds what the generations of a coordinator share.

A turn comes from `turn_preparer`; the generation then runs in a task of its own (`generation`). Shared are the commit
queue, the lease keeper and the draft sources' statistics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import PurePath

from coordinator.admission.slots import RunningSlot
from coordinator.audit.turn_audit import Auditor, TurnAudit
from coordinator.generation.accounting import Account
from coordinator.generation.generation import Collaborators, Generation, Learners
from coordinator.generation.held_session import HeldSession
from coordinator.generation.interrupted_turns import InterruptedTurns
from coordinator.generation.publisher import CommitQueue, Publisher
from coordinator.generation.removal import SessionRemoval
from coordinator.generation.request_trace import begin_request_trace
from coordinator.generation.session_leases import LeaseKeeper
from coordinator.generation.stream import OutputStream
from coordinator.generation.turn import PreparedTurn, Turn
from coordinator.learning.recorder import Recorder
from coordinator.learning.turn_record import TurnRecord
from coordinator.replicas.placement import Placement, SessionReplicas
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.prefixes import Prefixes
from coordinator.round.draft_source_factory import DraftSourceFactory
from coordinator.round.grammar_drafts import ForcedTokens
from coordinator.round.request_router import RequestRouter
from coordinator.round.runner import RoundRunner
from coordinator.round.session_calls import SessionCalls
from coordinator.round.setting import RoundSetting
from coordinator.round.target_calls import TargetCalls
from coordinator.text.tokenizer import ServedTokenizer
from specdec.observability.coordinator_metrics import CoordinatorMetrics
from specdec.state.store import SessionStore
from specdec.structured.matcher import Matcher
from specdec.structured.paced_threads import PacedThreads


class GenerationFactory:
    """Builds the generations of one coordinator. Used from one event loop."""

    def __init__(
        self,
        *,
        store: SessionStore,
        pools: ReplicaPools,
        placement: Placement,
        removal: SessionRemoval,
        prefixes: Prefixes,
        draft_sources: DraftSourceFactory,
        metrics: CoordinatorMetrics,
        draft_timeout_s: float | None,
        kv_wait_s: float,
        recovery_s: float,
        tokenizer: ServedTokenizer,
        recorder: Recorder | None = None,
        auditor: Auditor | None = None,
    ) -> None:
        self._store = store
        self._pools = pools
        self._placement = placement
        self._removal = removal
        self._prefixes = prefixes
        self._draft_sources = draft_sources
        self._metrics = metrics
        self._interrupted = InterruptedTurns(store, metrics, recovery_s)
        self._draft_timeout_s = draft_timeout_s
        self._kv_wait_s = kv_wait_s
        self._tokenizer = tokenizer
        self._recorder = recorder
        self._auditor = auditor
        self._commits = CommitQueue(store)
        self._lease_keeper = LeaseKeeper(store)
        self._search_threads = PacedThreads("specdec-forced")

    def start(self, prepared: PreparedTurn, slot: RunningSlot) -> Generation:
        """Start the task of a generation. Nothing is awaited, so that the turn's lease always has an owner.

        The generation tells `slot` how fast it is, and takes its turns there; the caller releases it.
        """
        turn = prepared.turn
        stream = OutputStream(turn.identity)
        if prepared.replayed is not None:
            stream.publish(prepared.replayed)
        key = turn.lease.key
        self._interrupted.note_started(key, turn.identity.request_id)
        note_interrupted = partial(self._interrupted.note, key, turn.identity)
        parameters = turn.identity.parameters
        model = parameters.adapter or PurePath(self._pools.model_info(parameters.target_fingerprint).model).name
        trace = begin_request_trace(prepared, model)
        account = Account(
            turn.identity,
            prepared.stats,
            self._metrics,
            note_interrupted,
            prepared.began,
            slot=slot,
            tenant=turn.lease.tenant,
            trace=trace,
        )
        setting = self._round_setting(turn, is_timed=trace is not None)
        router = self._draft_sources.router(turn.identity.parameters.speculation, setting, turn.tokens)
        replicas = self._replicas(prepared, router)
        calls = SessionCalls(setting, turn.tokens, replicas)
        runner = self._runner(turn, setting, replicas, calls, router, lambda: slot.may_run_ahead)
        return Generation(
            turn,
            Collaborators(
                runner=runner,
                calls=calls,
                session=self._session(prepared, replicas),
                publisher=Publisher(
                    turn,
                    stream,
                    account,
                    store=self._store.of_tenant(turn.lease.tenant),
                    commits=self._commits,
                    on_committed=runner.note_committed,
                    trace=trace,
                ),
                stream=stream,
                account=account,
                learners=Learners(
                    partial(self._draft_sources.remember, turn.lease.tenant),
                    router,
                    self._record(turn, setting),
                    self._audit(turn, setting, replicas),
                ),
                slot=slot,
            ),
        )

    async def close(self) -> None:
        """Stop what the generations share. Call it when no generation runs. Idempotent."""
        self._search_threads.close()
        await self._interrupted.close()
        await self._lease_keeper.close()
        await self._draft_sources.close()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)

    def _record(self, turn: Turn, setting: RoundSetting) -> TurnRecord | None:
        if self._recorder is None:
            return None
        return self._recorder.record(setting, turn.identity.parameters.target_fingerprint, len(turn.tokens))

    def _audit(self, turn: Turn, setting: RoundSetting, replicas: SessionReplicas) -> TurnAudit | None:
        if self._auditor is None:
            return None
        return self._auditor.turn(turn.identity.request_id, setting, turn.tokens, replicas)

    def _replicas(self, prepared: PreparedTurn, router: RequestRouter | None) -> SessionReplicas:
        identity, agreed_len = prepared.turn.identity, prepared.agreed_len
        replicas = self._placement.session(prepared.turn.lease.key)
        routed_pool = "" if router is None else router.begin()
        replicas.draft_pool = routed_pool or self._pools.model_pool(identity.parameters.speculation.draft_pool)
        replicas.target_fingerprint = identity.parameters.target_fingerprint
        replicas.adapter = identity.parameters.adapter
        replicas.truncate_to(agreed_len, assumed_len=0 if prepared.is_new_session else agreed_len)
        replicas.begin_turn(agreed_len, prepared.kv_locations, prepared.prefix_tokens)
        return replicas

    def _session(self, prepared: PreparedTurn, replicas: SessionReplicas) -> HeldSession:
        return HeldSession(
            prepared.turn,
            replicas,
            store=self._store,
            lease_keeper=self._lease_keeper,
            removal=self._removal,
            prefixes=self._prefixes,
            is_new=prepared.is_new_session,
        )

    def _runner(
        self,
        turn: Turn,
        setting: RoundSetting,
        replicas: SessionReplicas,
        calls: SessionCalls,
        router: RequestRouter | None,
        may_run_ahead: Callable[[], bool],
    ) -> RoundRunner:
        choice, tokens = turn.identity.parameters.speculation, turn.tokens
        drafts = self._draft_sources.source(choice, setting, tokens, replicas, calls, router, self._forced(turn))
        return RoundRunner(setting, tokens, replicas, drafts, TargetCalls(setting, replicas, calls), may_run_ahead)

    def _forced(self, turn: Turn) -> ForcedTokens | None:
        """Return what finds the tokens that a turn's constraint forces; None without a constraint."""
        parameters = turn.identity.parameters
        constraint = parameters.sampling.constraint
        if constraint is None:
            return None
        eos_token_ids = self._pools.model_info(parameters.target_fingerprint).eos_token_ids

        def open_matcher() -> Matcher:
            return Matcher(self._tokenizer.token_table(eos_token_ids), constraint)

        return ForcedTokens(open_matcher, turn.tokens, turn.identity.output_start, self._search_threads)

    def _round_setting(self, turn: Turn, *, is_timed: bool) -> RoundSetting:
        identity, sampling = turn.identity, turn.identity.parameters.sampling
        return RoundSetting(
            session_id=identity.session_id,
            epoch=turn.lease.epoch,
            turn=identity.turn,
            output_start=identity.output_start,
            filters=sampling.filters,
            seed=sampling.seed,
            mode=identity.parameters.speculation.mode,
            num_logprobs=sampling.num_logprobs,
            # No tokenizer knows ids beyond its own size, whatever size a target states.
            vocabulary_size=min(self._tokenizer.vocabulary_size, self._pools.target_info.vocabulary_size),
            draft_timeout_s=self._draft_timeout_s,
            max_session_tokens=identity.output_start + sampling.max_new_tokens,
            kv_wait_s=self._kv_wait_s,
            tenant=turn.lease.tenant,
            end_token_ids=turn.writer.end_token_ids,
            constraint=sampling.constraint,
            is_timed=is_timed,
            adapter=identity.parameters.adapter,
            adapter_fingerprint=identity.parameters.adapter_fingerprint,
        )
