"""Every kind of draft that requests may have, and what all requests together know of each pool.

The one place where a pool's name becomes a source of drafts. Not here: what a source does (`draft_source`,
`lookup_drafts`, `local_drafts`), which pool a request is routed to (`replicas/pool`). One for a coordinator; called by
`generation/assembly`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from coordinator.lookup.history import TokenHistory
from coordinator.lookup.lookup import Lookup, LookupKind
from coordinator.replicas.placement import SessionReplicas
from coordinator.replicas.pool import ReplicaPools
from coordinator.requests import DraftFigures, SpeculationChoice
from coordinator.round.draft_calls import DraftCalls
from coordinator.round.draft_clock import DraftClock
from coordinator.round.draft_source import AskedDrafts, DraftSource, ModelDrafts
from coordinator.round.gamma import GammaChooser, PoolRecord
from coordinator.round.local_drafts import LocalDrafts
from coordinator.round.lookup_drafts import LookupDrafts
from coordinator.round.session_calls import SessionCalls
from coordinator.round.setting import RoundSetting
from coordinator.round.tokens import SessionTokens
from specdec.types import Mode


class DraftKinds:
    """Makes the sources of drafts of one coordinator's requests. Used from one event loop."""

    def __init__(self, pools: ReplicaPools, history: TokenHistory | None) -> None:
        """`history`: where `suffix` looks beside the session; None: nowhere."""
        self._pools = pools
        self._history = history
        self._records: defaultdict[str, PoolRecord] = defaultdict(PoolRecord)
        self._clocks: defaultdict[str, DraftClock] = defaultdict(DraftClock)

    def figures(self, pool: str) -> DraftFigures:
        """What requests have shown of a draft pool."""
        record = self._records.get(pool)
        return DraftFigures(None, None) if record is None else DraftFigures(record.measured_alpha, record.mean_gamma)

    def remember(self, token_ids: Sequence[int]) -> None:
        """A turn has said this: later drafts may be found there."""
        if self._history is not None:
            self._history.add(token_ids)

    async def close(self) -> None:
        """To be called when no generation runs. Idempotent."""
        if self._history is not None:
            await self._history.close()

    def source(
        self,
        wanted: SpeculationChoice,
        setting: RoundSetting,
        tokens: SessionTokens,
        replicas: SessionReplicas,
        calls: SessionCalls,
    ) -> DraftSource:
        """The drafts of one request.

        Args:
            wanted: `draft_pool` is the pool it was routed to.
            setting: of the request.
            tokens: of its session.
            replicas: of its session; `draft_pool` is whose model drafts, "" for none.
            calls: of its rounds.
        """
        asked: AskedDrafts = self._models(wanted, setting, replicas, calls)
        if setting.mode is Mode.OFF:
            return asked
        if local := self._pools.local_pool(wanted.draft_pool):
            asked = LocalDrafts(local, self._chooser(local, wanted))
        if wanted.draft_pool not in self._pools.lookup_pools:
            return asked
        return LookupDrafts(
            wanted.draft_pool,
            Lookup(LookupKind(wanted.draft_pool), self._history),
            tokens,
            self._chooser(wanted.draft_pool, wanted),
            asked if local or replicas.draft_pool else None,
            with_supports=not setting.answers_choices,
        )

    def _chooser(self, pool: str, wanted: SpeculationChoice) -> GammaChooser:
        """Of a pool whose drafts need no draft replica."""
        return GammaChooser(self._records[pool], fixed=wanted.gamma, max_gamma=self._pools.target_info.max_gamma)

    def _models(
        self, wanted: SpeculationChoice, setting: RoundSetting, replicas: SessionReplicas, calls: SessionCalls
    ) -> ModelDrafts:
        pool = replicas.draft_pool
        fixed = 0 if setting.mode is Mode.OFF else wanted.gamma
        chooser = GammaChooser(self._records[pool], fixed=fixed, max_gamma=self._pools.max_gamma)
        return ModelDrafts(pool, chooser, DraftCalls(setting, replicas, calls, self._clocks[pool]))
