"""A draft whose pool may change between two rounds: where another one pays, or where its own is gone.

Not here: which pool that is (`request_route`), the draft of one pool (`draft_source`). Made by `draft_kinds`.
"""

from __future__ import annotations

from collections.abc import Callable

from coordinator.replicas.placement import SessionReplicas
from coordinator.round.draft_calls import DraftAnswer
from coordinator.round.draft_source import AdaptiveDraftSource
from coordinator.round.gamma import GammaChooser, RoundTimes
from coordinator.round.request_router import RequestRouter
from specdec.rpc.calls import WireStats

#: Why a round had no draft, where another pool may have one.
_OUTGROWN = "draft_context"
_GONE = ("no_replica", "REPLICA_UNAVAILABLE", _OUTGROWN)


class RoutedDraftSource:
    """Implements `coordinator.round.draft_source.AdaptiveDraftSource`."""

    def __init__(
        self, route: RequestRouter, replicas: SessionReplicas, drafts_of: Callable[[str], AdaptiveDraftSource]
    ) -> None:
        """
        Args:
            route: of the request.
            replicas: of its session; `draft_pool` is the pool to begin with.
            drafts_of: makes the drafts of a pool.
        """
        self._route = route
        self._replicas = replicas
        self._drafts_of = drafts_of
        self._made = {replicas.draft_pool: drafts_of(replicas.draft_pool)}
        self._missing_cause = ""
        """Of the last round's draft."""
        self._is_targets_own = False
        """Whether that was asked of the target itself: one that does not draft in the pool will not learn to."""

    @property
    def chooser(self) -> GammaChooser:
        """Of the pool there is now."""
        return self._drafts.chooser

    async def propose(self, round_id: int, limit: int, committed_len: int, wire: WireStats) -> DraftAnswer:
        """See `DraftSource`."""
        pool = self._replicas.draft_pool
        if self._missing_cause in _GONE:
            following = self._route.leave(pool, for_good=self._is_targets_own or self._missing_cause == _OUTGROWN)
        else:
            following = self._route.next_pool(pool, limit if self.chooser.most(limit) else 0)
        if following and following != pool:
            self._replicas.draft_pool = following
            if following not in self._made:
                self._made[following] = self._drafts_of(following)
        answer = await self._drafts.propose(round_id, limit, committed_len, wire)
        self._missing_cause = answer.missing_cause
        return answer

    def observe(self, draft: DraftAnswer, times: RoundTimes) -> None:
        """See `DraftSource`."""
        self._missing_cause, self._is_targets_own = draft.missing_cause, draft.local is not None
        self._drafts.observe(draft, times)

    @property
    def _drafts(self) -> AdaptiveDraftSource:
        return self._made[self._replicas.draft_pool]
