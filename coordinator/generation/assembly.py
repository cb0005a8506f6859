"""Assembly of a generation: everything that one works with, built from what it begins with.

From here a generation runs in a task of its own (`generation`). What the generations of this coordinator share lives
here too: the commits' queue, the lease keeper, what is known of each draft pool. Not here: what a generation begins
with (`beginnings`), which of them run (`admission`).
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from coordinator.generation.accounting import Account
from coordinator.generation.beginnings import Beginning
from coordinator.generation.commits import CommitQueue
from coordinator.generation.generation import Generation, GenerationParts
from coordinator.generation.lease_keeper import LeaseKeeper
from coordinator.generation.publisher import Publisher
from coordinator.generation.removal import SessionRemoval
from coordinator.generation.stream import OutputStream
from coordinator.replicas.placement import Placement, SessionReplicas
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.prefixes import Prefixes
from coordinator.requests import DraftFigures, GenerationIdentity
from coordinator.round.draft_clock import DraftClock
from coordinator.round.gamma import GammaChooser, PoolRecord
from coordinator.round.runner import RoundRunner
from coordinator.round.setting import RoundSetting
from specdec.observability.metrics import CoordinatorMetrics
from specdec.state.store import Lease, SessionStore
from specdec.types import Mode


class GenerationAssembly:
    """Builds the generations of one coordinator. Used from one event loop."""

    def __init__(
        self,
        *,
        store: SessionStore,
        pools: ReplicaPools,
        placement: Placement,
        removal: SessionRemoval,
        prefixes: Prefixes,
        metrics: CoordinatorMetrics,
        draft_timeout_s: float | None,
        tenant: str,
    ) -> None:
        self._store = store
        self._pools = pools
        self._placement = placement
        self._removal = removal
        self._prefixes = prefixes
        self._tenant = tenant
        self._metrics = metrics
        self._draft_timeout_s = draft_timeout_s
        self._commits = CommitQueue(store)
        self._lease_keeper = LeaseKeeper(store)
        self._pool_records: defaultdict[str, PoolRecord] = defaultdict(PoolRecord)
        self._draft_clocks: defaultdict[str, DraftClock] = defaultdict(DraftClock)

    def draft_figures(self, draft_pool: str) -> DraftFigures:
        """What requests have shown of a draft pool."""
        record = self._pool_records.get(draft_pool)
        return DraftFigures(None, None) if record is None else DraftFigures(record.measured_alpha, record.mean_gamma)

    def start(self, beginning: Beginning) -> tuple[Generation, GenerationParts]:
        """Starts a generation's task. Nothing is awaited, so that a lease taken before is always owned by somebody."""
        identity, lease, tokens = beginning.identity, beginning.lease, beginning.tokens
        stream = OutputStream(identity)
        if beginning.replayed is not None:
            stream.publish(beginning.replayed)
        replicas = self._replicas(beginning)
        account = Account(identity, beginning.stats, self._metrics, beginning.began)
        parts = GenerationParts(
            store=self._store,
            lease=lease,
            lease_keeper=self._lease_keeper,
            runner=RoundRunner(
                self._round_setting(identity, lease),
                tokens,
                replicas,
                self._gamma(identity),
                self._draft_clocks[replicas.draft_pool],
            ),
            replicas=replicas,
            prefixes=self._prefixes,
            tokens=tokens,
            writer=beginning.writer,
            round_id=beginning.round_id,
            account=account,
            stream=stream,
            publisher=Publisher(self._store, self._commits, lease, tokens, stream, account),
            on_failure_without_output=partial(self._discard, beginning),
        )
        return Generation(identity, parts), parts

    async def close(self) -> None:
        """To be called when no generation runs. Idempotent."""
        await self._lease_keeper.close()

    def _replicas(self, beginning: Beginning) -> SessionReplicas:
        parameters = beginning.identity.parameters
        replicas = self._placement.session(beginning.identity.session_id)
        replicas.draft_pool = parameters.speculation.draft_pool
        replicas.target_fingerprint = parameters.target_fingerprint
        replicas.truncate_to(beginning.agreed_len, assumed_len=0 if beginning.is_new_session else beginning.agreed_len)
        replicas.begin_turn(beginning.agreed_len, beginning.homes, beginning.prefix_tokens)
        return replicas

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
        )

    def _gamma(self, identity: GenerationIdentity) -> GammaChooser:
        speculation = identity.parameters.speculation
        return GammaChooser(
            self._pool_records[speculation.draft_pool],
            fixed=0 if speculation.mode is Mode.OFF else speculation.gamma,
            max_gamma=self._pools.max_gamma,
        )

    async def _discard(self, beginning: Beginning) -> None:
        """A session made by a request that failed before its first token is of no use to anybody."""
        if beginning.is_new_session:
            await self._removal.remove_held(beginning.lease)
