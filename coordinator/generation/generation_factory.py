"""Assembly of a generation: everything that one works with, built from what it begins with.

From here a generation runs in a task of its own (`generation`). What the generations of this coordinator share lives
here too: the commits' queue, the lease keeper, what is known of each draft pool. Not here: what a generation begins
with (`turn_preparer`), which of them run (`admission`).
"""

from __future__ import annotations

import asyncio
from functools import partial

from coordinator.generation.accounting import Account
from coordinator.generation.commits import CommitQueue
from coordinator.generation.generation import Generation, GenerationParts
from coordinator.generation.lease_keeper import LeaseKeeper
from coordinator.generation.publisher import Publisher
from coordinator.generation.removal import SessionRemoval
from coordinator.generation.stream import OutputStream
from coordinator.generation.turn_preparer import PreparedTurn
from coordinator.learning.recorder import Recorder
from coordinator.learning.turn_record import TurnRecord
from coordinator.replicas.placement import Placement, SessionReplicas
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.prefixes import Prefixes
from coordinator.requests import GenerationIdentity
from coordinator.round.draft_source_factory import DraftSourceFactory
from coordinator.round.request_router import RequestRouter
from coordinator.round.runner import RoundRunner
from coordinator.round.session_calls import SessionCalls
from coordinator.round.setting import RoundSetting
from coordinator.round.target_calls import TargetCalls
from coordinator.round.timeline import TimelineLog
from specdec.observability.metrics import CoordinatorMetrics
from specdec.state.store import Lease, SessionStore


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
        draft_kinds: DraftSourceFactory,
        recorder: Recorder | None,
        metrics: CoordinatorMetrics,
        draft_timeout_s: float | None,
        tenant: str,
        timelines: TimelineLog | None = None,
    ) -> None:
        self._store = store
        self._pools = pools
        self._placement = placement
        self._removal = removal
        self._prefixes = prefixes
        self._draft_kinds = draft_kinds
        self._recorder = recorder
        self._tenant = tenant
        self._timelines = timelines
        self._metrics = metrics
        self._draft_timeout_s = draft_timeout_s
        self._commits = CommitQueue(store)
        self._lease_keeper = LeaseKeeper(store)

    def start(self, beginning: PreparedTurn) -> tuple[Generation, GenerationParts]:
        """Starts a generation's task. Nothing is awaited, so that a lease taken before is always owned by somebody."""
        identity, lease, tokens = beginning.identity, beginning.lease, beginning.tokens
        stream = OutputStream(identity)
        if beginning.replayed is not None:
            stream.publish(beginning.replayed)
        setting = self._round_setting(identity, lease)
        route = self._draft_kinds.router(identity.parameters.speculation, setting, tokens)
        replicas = self._replicas(beginning, route)
        account = Account(identity, beginning.stats, self._metrics, beginning.began)
        parts = GenerationParts(
            store=self._store,
            lease=lease,
            lease_keeper=self._lease_keeper,
            runner=self._runner(beginning, setting, replicas, route),
            replicas=replicas,
            prefixes=self._prefixes,
            tokens=tokens,
            writer=beginning.writer,
            round_id=beginning.round_id,
            account=account,
            stream=stream,
            publisher=Publisher(self._store, self._commits, lease, tokens, stream, account, self._timelines),
            on_failure=partial(self._after_failure, beginning),
            remember_output=self._draft_kinds.remember,
            route=route,
            record=self._record(beginning, setting),
        )
        return Generation(identity, parts), parts

    async def close(self) -> None:
        """To be called when no generation runs. Idempotent."""
        await self._lease_keeper.close()
        await self._draft_kinds.close()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)

    def _record(self, beginning: PreparedTurn, setting: RoundSetting) -> TurnRecord | None:
        if self._recorder is None:
            return None
        fingerprint = beginning.identity.parameters.target_fingerprint
        return self._recorder.record(setting, fingerprint, len(beginning.tokens))

    def _replicas(self, beginning: PreparedTurn, route: RequestRouter | None) -> SessionReplicas:
        parameters = beginning.identity.parameters
        replicas = self._placement.session(beginning.identity.session_id)
        routed = "" if route is None else route.begin()
        replicas.draft_pool = routed or self._pools.model_pool(parameters.speculation.draft_pool)
        replicas.target_fingerprint = parameters.target_fingerprint
        replicas.truncate_to(beginning.agreed_len, assumed_len=0 if beginning.is_new_session else beginning.agreed_len)
        replicas.begin_turn(beginning.agreed_len, beginning.homes, beginning.prefix_tokens)
        return replicas

    def _runner(
        self, beginning: PreparedTurn, setting: RoundSetting, replicas: SessionReplicas, route: RequestRouter | None
    ) -> RoundRunner:
        wanted, tokens = beginning.identity.parameters.speculation, beginning.tokens
        calls = SessionCalls(setting, tokens, replicas)
        drafts = self._draft_kinds.source(wanted, setting, tokens, replicas, calls, route)
        return RoundRunner(setting, tokens, replicas, drafts, TargetCalls(setting, replicas, calls))

    def _round_setting(self, identity: GenerationIdentity, lease: Lease) -> RoundSetting:
        sampling = identity.parameters.sampling
        return RoundSetting(
            session_id=identity.session_id,
            epoch=lease.epoch,
            turn=identity.turn,
            output_start=identity.output_start,
            filters=sampling.filters,
            seed=sampling.seed,
            mode=identity.parameters.speculation.mode,
            num_logprobs=sampling.num_logprobs,
            vocabulary_size=self._pools.target_info.vocabulary_size,
            draft_timeout_s=self._draft_timeout_s,
            tenant=self._tenant,
            is_timed=self._timelines is not None,
        )

    async def _after_failure(self, beginning: PreparedTurn, is_useless: bool) -> None:
        """See `SessionRemoval.after_failure`."""
        await self._removal.after_failure(beginning.lease, is_useless=is_useless and beginning.is_new_session)
