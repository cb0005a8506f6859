"""Makes the draft source of each request, and holds what all requests together have learned about each draft pool.

This is the only place where the name of a pool becomes a source. `generation/generation_factory` uses one factory per
coordinator. `replicas/pool` decides which pool a request is routed to when it begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from coordinator.lookup.history import TokenHistories
from coordinator.lookup.lookup import Lookup, LookupKind
from coordinator.replicas.placement import SessionReplicas
from coordinator.replicas.pool import ReplicaPools
from coordinator.requests import DraftStats, RouteStats, SpeculationChoice
from coordinator.round.draft_calls import DraftCalls
from coordinator.round.draft_deadline import DraftDeadline
from coordinator.round.draft_sources import (
    AdaptiveDraftSource,
    DraftSource,
    InTargetDraftSource,
    ReplicaDraftSource,
    RoutedDraftSource,
)
from coordinator.round.gamma import GammaChooser
from coordinator.round.grammar_drafts import ForcedTokens, GrammarDraftSource
from coordinator.round.lookup_drafts import LookupDraftSource
from coordinator.round.pool_stats import PoolStatsTable
from coordinator.round.request_router import RequestRouter
from coordinator.round.routing_table import RoutingTable
from coordinator.round.session_calls import SessionCalls
from coordinator.round.session_tokens import SessionTokens
from coordinator.round.setting import RoundSetting
from coordinator.routing.classes import MOST_PROMPT_TOKENS
from coordinator.routing.promotion import Canary
from coordinator.routing.score_queue import ScoreQueue
from specdec.contract.types import Mode


class DraftSourceFactory:
    """Makes the draft sources of one coordinator's requests. Used from one event loop."""

    def __init__(
        self,
        pools: ReplicaPools,
        histories: TokenHistories | None,
        scores: ScoreQueue | None = None,
        canary: Canary | None = None,
        text_of: Callable[[Sequence[int]], str] = lambda token_ids: "",
    ) -> None:
        """
        Args:
            pools: the draft pools.
            histories: text that `suffix` searches beside the session's own, by tenant; None for none.
            scores: queue of spans to score, by which requests are routed among draft models; None: no routing.
            canary: names the requests that get a pool under promotion, if requests are routed.
            text_of: decodes tokens; prompts are classified by their text.
        """
        self._pools = pools
        self._histories = histories
        self._stats = PoolStatsTable(pools.serves)
        self._deadlines: defaultdict[str, DraftDeadline] = defaultdict(DraftDeadline)
        self._routes = None if scores is None else RoutingTable(pools, self._stats, scores, canary, text_of)

    @property
    def is_routing(self) -> bool:
        """True if a request that names no pool is routed among the draft models while it runs."""
        return self._routes is not None

    def draft_stats(self, pool: str, adapter: str = "") -> DraftStats:
        """Return what requests have shown about a draft pool; for routed requests, as their classes and scores say.

        Args:
            pool: the pool.
            adapter: fingerprint of the adapter of the requests; "" for those without one.
        """
        stats = self._stats.get(pool, adapter)
        routed = None if self._routes is None else self._routes.alpha(pool, adapter)
        if stats is None:
            return DraftStats(routed, None)
        return DraftStats(stats.measured_alpha if routed is None else routed, stats.mean_gamma)

    def adapter_stats(self, adapter: str) -> DraftStats:
        """Return what requests with an adapter have shown about the pool that drafted most for it."""
        of_pools = self._stats.of_adapter(adapter)
        pool = max(of_pools, key=lambda name: of_pools[name].num_rounds, default="")
        return self.draft_stats(pool, adapter)

    def route_stats(self, pool: str) -> list[RouteStats]:
        """Return the statistics of a draft pool for each class of requests; empty if requests are not routed."""
        return [] if self._routes is None else self._routes.stats(pool)

    def router(self, wanted: SpeculationChoice, setting: RoundSetting, tokens: SessionTokens) -> RequestRouter | None:
        """Return the router of a request that may use any draft model; None if it names a pool or wants no draft."""
        if self._routes is None or wanted.draft_pool or setting.mode is Mode.OFF:
            return None
        start = max(0, setting.output_start - MOST_PROMPT_TOKENS)
        end_of_prompt = tokens.tail(start)[: setting.output_start - start]
        request_class = self._routes.class_of(wanted.task, setting, end_of_prompt)
        return RequestRouter(request_class, self._routes, setting, tokens)

    def remember(self, tenant: str, token_ids: Sequence[int]) -> None:
        """Add the output of a turn to the text in which later drafts are searched."""
        if self._histories is not None:
            self._histories.add(tenant, token_ids)

    async def close(self) -> None:
        """Release everything. Call it when no generation runs. Idempotent."""
        if self._histories is not None:
            await self._histories.close()
        if self._routes is not None:
            await self._routes.close()

    def source(
        self,
        wanted: SpeculationChoice,
        setting: RoundSetting,
        tokens: SessionTokens,
        replicas: SessionReplicas,
        calls: SessionCalls,
        router: RequestRouter | None = None,
        forced: ForcedTokens | None = None,
    ) -> DraftSource:
        """Return the draft source of one request.

        Args:
            wanted: `draft_pool` is the pool that the request was routed to; "" if a `router` chooses, and then text
                is searched before a model is called.
            setting: parameters of the request's rounds.
            tokens: tokens of the session.
            replicas: replicas of the session; `draft_pool` is the pool whose model drafts, "" for none.
            calls: calls of the request's rounds.
            router: router of the request, if its model's pool may change.
            forced: tokens that the request's constraint forces; None without one.
        """
        source = self._source(wanted, setting, tokens, replicas, calls, router)
        if forced is None or setting.mode is Mode.OFF:
            return source
        max_gamma = self._pools.target_info.max_gamma
        return GrammarDraftSource(forced, source, max_gamma=max_gamma, with_supports=not setting.answers_choices)

    def _source(
        self,
        wanted: SpeculationChoice,
        setting: RoundSetting,
        tokens: SessionTokens,
        replicas: SessionReplicas,
        calls: SessionCalls,
        router: RequestRouter | None,
    ) -> DraftSource:
        """Return the source of drafts that are not forced."""
        source_of = partial(self._model_source, wanted, setting, replicas, calls)
        models: AdaptiveDraftSource = (
            source_of(replicas.draft_pool) if router is None else RoutedDraftSource(router, replicas, source_of)
        )
        if setting.mode is Mode.OFF:
            return models
        pool, local = wanted.draft_pool, self._pools.local_pool(wanted.draft_pool)
        if router is not None:  # text is searched before any model is called
            pool, local = next(iter(self._pools.lookup_pools), ""), ""
        if local:
            models = self._in_target_source(wanted, setting, local)
        if pool not in self._pools.lookup_pools:
            return models
        return LookupDraftSource(
            pool,
            Lookup(LookupKind(pool), None if self._histories is None else self._histories.of(setting.tenant)),
            tokens,
            self._chooser(pool, wanted, setting, self._pools.target_info.max_gamma),
            models if local or replicas.draft_pool else None,
            with_supports=not setting.answers_choices,
        )

    def _chooser(self, pool: str, wanted: SpeculationChoice, setting: RoundSetting, max_gamma: int) -> GammaChooser:
        """Return the chooser of a pool whose drafts need no draft replica."""
        fixed = None if wanted.gamma is None else min(wanted.gamma, max_gamma)
        return GammaChooser(self._stats.of(pool, setting.adapter_fingerprint), fixed=fixed, max_gamma=max_gamma)

    def _in_target_source(self, wanted: SpeculationChoice, setting: RoundSetting, pool: str) -> InTargetDraftSource:
        return InTargetDraftSource(pool, self._chooser(pool, wanted, setting, self._pools.local_gamma(pool)))

    def _model_source(
        self,
        wanted: SpeculationChoice,
        setting: RoundSetting,
        replicas: SessionReplicas,
        calls: SessionCalls,
        pool: str,
    ) -> AdaptiveDraftSource:
        """Return the source of a pool of draft replicas, or of local drafts that requests may be routed to."""
        if pool in self._pools.local_pools and setting.mode is not Mode.OFF:
            return self._in_target_source(wanted, setting, pool)
        fixed = 0 if setting.mode is Mode.OFF else wanted.gamma
        stats = self._stats.of(pool, setting.adapter_fingerprint)
        chooser = GammaChooser(stats, fixed=fixed, max_gamma=self._pools.max_gamma)
        return ReplicaDraftSource(chooser, DraftCalls(pool, setting, replicas, calls, self._deadlines[pool]))
