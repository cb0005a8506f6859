"""Every kind of draft that requests may have, and what all requests together know of each pool.

The one place where a pool's name becomes a source of drafts. Not here: what a source does (`draft_source`,
`lookup_drafts`, `local_drafts`), which pool a request is routed to (`replicas/pool`). One for a coordinator; called by
`generation/generation_factory`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from coordinator.lookup.history import TokenHistory
from coordinator.lookup.lookup import Lookup, LookupKind
from coordinator.replicas.placement import SessionReplicas
from coordinator.replicas.pool import ReplicaPools
from coordinator.requests import DraftStats, RouteStats, SpeculationChoice
from coordinator.round.draft_calls import DraftCalls
from coordinator.round.draft_deadline import DraftDeadline
from coordinator.round.draft_source import AdaptiveDraftSource, DraftSource, ReplicaDraftSource
from coordinator.round.gamma import DraftPoolStats, GammaChooser
from coordinator.round.local_drafts import InTargetDraftSource
from coordinator.round.lookup_drafts import LookupDraftSource
from coordinator.round.request_router import RequestRouter
from coordinator.round.routed_drafts import RoutedDraftSource
from coordinator.round.routing_table import RoutingTable
from coordinator.round.session_calls import SessionCalls
from coordinator.round.setting import RoundSetting
from coordinator.round.tokens import SessionTokens
from coordinator.routing.classes import MOST_PROMPT_TOKENS
from coordinator.routing.promotion import Canary
from coordinator.routing.scoring import ScoreQueue
from specdec.types import Mode


class DraftSourceFactory:
    """Makes the sources of drafts of one coordinator's requests. Used from one event loop."""

    def __init__(
        self,
        pools: ReplicaPools,
        history: TokenHistory | None,
        scores: ScoreQueue | None = None,
        canary: Canary | None = None,
        text_of: Callable[[Sequence[int]], str] = lambda token_ids: "",
    ) -> None:
        """
        Args:
            pools: the draft pools there are.
            history: where `suffix` looks beside the session; None: nowhere.
            scores: what requests are routed among draft models by; None: they are not.
            canary: says which requests get a pool that is being promoted, where they are routed.
            text_of: tokens as text: prompts are told apart by it.
        """
        self._pools = pools
        self._history = history
        self._records: defaultdict[str, DraftPoolStats] = defaultdict(DraftPoolStats)
        self._clocks: defaultdict[str, DraftDeadline] = defaultdict(DraftDeadline)
        self._routes = None if scores is None else RoutingTable(pools, self._records, scores, canary, text_of)

    @property
    def is_routing(self) -> bool:
        """Whether a request that names no pool is routed among the draft models while it runs."""
        return self._routes is not None

    def figures(self, pool: str) -> DraftStats:
        """What requests have shown of a draft pool: of routed ones what their classes did, scores among it."""
        record, routed = self._records.get(pool), None if self._routes is None else self._routes.alpha(pool)
        if record is None:
            return DraftStats(routed, None)
        return DraftStats(record.measured_alpha if routed is None else routed, record.mean_gamma)

    def route_stats(self, pool: str) -> list[RouteStats]:
        """What is known of a draft pool for each class of requests; nothing where they are not routed."""
        return [] if self._routes is None else self._routes.figures(pool)

    def route(self, wanted: SpeculationChoice, setting: RoundSetting, tokens: SessionTokens) -> RequestRouter | None:
        """The route of a request that may have any draft model; None where it has one, or wants none."""
        if self._routes is None or wanted.draft_pool or setting.mode is Mode.OFF:
            return None
        start = max(0, setting.output_start - MOST_PROMPT_TOKENS)
        end_of_prompt = tokens.tail(start)[: setting.output_start - start]
        request_class = self._routes.class_of(wanted.task, setting.mode, setting.filters, end_of_prompt)
        return RequestRouter(request_class, self._routes, setting, tokens)

    def remember(self, token_ids: Sequence[int]) -> None:
        """A turn has said this: later drafts may be found there."""
        if self._history is not None:
            self._history.add(token_ids)

    async def close(self) -> None:
        """To be called when no generation runs. Idempotent."""
        if self._history is not None:
            await self._history.close()
        if self._routes is not None:
            await self._routes.close()

    def source(
        self,
        wanted: SpeculationChoice,
        setting: RoundSetting,
        tokens: SessionTokens,
        replicas: SessionReplicas,
        calls: SessionCalls,
        route: RequestRouter | None = None,
    ) -> DraftSource:
        """The drafts of one request.

        Args:
            wanted: `draft_pool` is the pool it was routed to; "" where that may change, which is text before a model.
            setting: of the request.
            tokens: of its session.
            replicas: of its session; `draft_pool` is whose model drafts, "" for none.
            calls: of its rounds.
            route: of the request, where its model's pool may change.
        """
        drafts_of = partial(self._asked, wanted, setting, replicas, calls)
        asked: AdaptiveDraftSource = (
            drafts_of(replicas.draft_pool) if route is None else RoutedDraftSource(route, replicas, drafts_of)
        )
        if setting.mode is Mode.OFF:
            return asked
        pool, local = wanted.draft_pool, self._pools.local_pool(wanted.draft_pool)
        if route is not None:  # text before all others
            pool, local = next(iter(self._pools.lookup_pools), ""), ""
        if local:
            asked = self._local(wanted, local)
        if pool not in self._pools.lookup_pools:
            return asked
        return LookupDraftSource(
            pool,
            Lookup(LookupKind(pool), self._history),
            tokens,
            self._chooser(pool, wanted, self._pools.target_info.max_gamma),
            asked if local or replicas.draft_pool else None,
            with_supports=not setting.answers_choices,
        )

    def _chooser(self, pool: str, wanted: SpeculationChoice, max_gamma: int) -> GammaChooser:
        """Of a pool whose drafts need no draft replica."""
        fixed = None if wanted.gamma is None else min(wanted.gamma, max_gamma)
        return GammaChooser(self._records[pool], fixed=fixed, max_gamma=max_gamma)

    def _local(self, wanted: SpeculationChoice, pool: str) -> InTargetDraftSource:
        return InTargetDraftSource(pool, self._chooser(pool, wanted, self._pools.local_gamma(pool)))

    def _asked(
        self,
        wanted: SpeculationChoice,
        setting: RoundSetting,
        replicas: SessionReplicas,
        calls: SessionCalls,
        pool: str,
    ) -> AdaptiveDraftSource:
        """The drafts of a pool of models, or of one of the targets' own that requests may be routed to."""
        if pool in self._pools.local_pools and setting.mode is not Mode.OFF:
            return self._local(wanted, pool)
        fixed = 0 if setting.mode is Mode.OFF else wanted.gamma
        chooser = GammaChooser(self._records[pool], fixed=fixed, max_gamma=self._pools.max_gamma)
        return ReplicaDraftSource(pool, chooser, DraftCalls(setting, replicas, calls, self._clocks[pool]))
