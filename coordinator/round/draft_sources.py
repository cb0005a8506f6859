"""The sources of a round's draft tokens: the contract, and the sources that a model stands behind.

A source decides how many draft tokens are worth their cost, gets them, and learns from what became of them. The
decision of a round does not depend on the source: a draft is tokens and the distributions they were drawn from
(docs/protocol.md section 9). `draft_source_factory` makes the sources; the `runner` calls them. Drafts that are found
in text are in `lookup_drafts`, the calls to a draft replica in `draft_calls`, the choice of gamma in `gamma`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from coordinator.replicas.placement import SessionReplicas
from coordinator.round.draft_calls import RUN_PORTION, Draft, DraftCalls
from coordinator.round.gamma import GammaChooser
from coordinator.round.pool_stats import RoundTimes, RunStepTimes
from coordinator.round.request_router import RequestRouter
from coordinator.round.target_calls import TargetAnswer
from specdec.contract.types import LocalDraft

#: Causes of a missing draft after which another pool may have one.
_OUTGROWN = "draft_context"
_GONE = ("no_replica", "REPLICA_UNAVAILABLE", _OUTGROWN)


class DraftSource(Protocol):
    """Gives the drafts of one request's rounds."""

    async def propose(self, round_id: int, limit: int, committed_len: int, forced: Sequence[int] = ()) -> Draft:
        """Return the draft of a round. Every failure gives a draft without tokens.

        Args:
            round_id: id of the round.
            limit: largest number of draft tokens that can still become output.
            committed_len: number of committed tokens of the session.
            forced: tokens that follow the committed ones for certain. The draft follows them, without holding them.
        """
        ...

    def complete(self, draft: Draft, target: TargetAnswer) -> Draft:
        """Return the round's draft once the target has verified it; a source may have it from that answer alone."""
        ...

    def observe(self, draft: Draft, times: RoundTimes) -> None:
        """Learn from a finished round."""
        ...

    def wants_draft(self, limit: int) -> bool:
        """Return whether `propose` would draft now, although it had no draft before."""
        ...

    def observe_run_step(self, times: RunStepTimes) -> None:
        """Learn from a step of a run."""
        ...


class AdaptiveDraftSource(DraftSource, Protocol):
    """A source whose drafts cost a forward pass, so that their number is chosen by what they gain."""

    @property
    def chooser(self) -> GammaChooser: ...


class ReplicaDraftSource:
    """Drafts of a draft replica. Implements `AdaptiveDraftSource`."""

    def __init__(self, chooser: GammaChooser, calls: DraftCalls) -> None:
        """Both belong to the same draft pool."""
        self.chooser = chooser
        self._calls = calls

    async def propose(self, round_id: int, limit: int, committed_len: int, forced: Sequence[int] = ()) -> Draft:
        """See `DraftSource.propose`."""
        return await self._calls.propose(round_id, self.chooser.choose(limit), committed_len, forced)

    def complete(self, draft: Draft, target: TargetAnswer) -> Draft:
        """See `DraftSource.complete`; the draft is complete already."""
        return draft

    def observe(self, draft: Draft, times: RoundTimes) -> None:
        """See `DraftSource.observe`."""
        self.chooser.observe(times)

    def wants_draft(self, limit: int) -> bool:
        """See `DraftSource.wants_draft`."""
        return self.chooser.choose(limit) > 0

    def observe_run_step(self, times: RunStepTimes) -> None:
        """See `DraftSource.observe_run_step`."""
        self.chooser.observe_run_step(times)


class InTargetDraftSource:
    """Drafts that the target makes by itself and verifies in the same call, which saves one trip.

    Implements `AdaptiveDraftSource`. The number of tokens is chosen as for a draft replica, from the time that drafting
    took at the target. The target decides whether it can draft: one that does not serve the pool, or has not run enough
    of the session yet, verifies a target-only step.
    """

    def __init__(self, pool: str, chooser: GammaChooser) -> None:
        """`chooser` is that of the targets' local drafts in `pool`."""
        self.chooser = chooser
        self._pool = pool

    async def propose(self, round_id: int, limit: int, committed_len: int, forced: Sequence[int] = ()) -> Draft:
        """See `DraftSource.propose`; the draft says what to request, and has no tokens yet.

        A target drafts after tokens with KV, so nothing follows forced tokens.
        """
        gamma = 0 if forced else self.chooser.choose(limit)
        if gamma < 1:
            return Draft(missing_cause="off", pool=self._pool, run_portion=RUN_PORTION)
        return Draft(local=LocalDraft(self._pool, gamma), pool=self._pool)

    def complete(self, draft: Draft, target: TargetAnswer) -> Draft:
        """See `DraftSource.complete`; the draft comes with the verification."""
        if draft.local is None:
            return draft
        proposal = target.verification.drafted
        if proposal is None:
            return draft._replace(missing_cause="not_drafted" if target.replica.can_draft(self._pool) else "no_replica")
        # The time comes from the target, so it is bounded by what was measured here; NaN becomes 0.
        draft_s = min(max(0.0, proposal.forward_s), target.wait_s)
        return draft._replace(
            proposal=proposal, wait_s=draft_s, verification_share_s=draft_s, num_requested=draft.local.gamma
        )

    def observe(self, draft: Draft, times: RoundTimes) -> None:
        """See `DraftSource.observe`."""
        self.chooser.observe(times)

    def wants_draft(self, limit: int) -> bool:
        """See `DraftSource.wants_draft`."""
        return self.chooser.choose(limit) > 0

    def observe_run_step(self, times: RunStepTimes) -> None:
        """See `DraftSource.observe_run_step`."""
        self.chooser.observe_run_step(times)


class RoutedDraftSource:
    """Drafts of a pool that may change between two rounds, if another pool is faster or the present one is gone.

    Implements `AdaptiveDraftSource`. `RequestRouter` chooses the pool.
    """

    def __init__(
        self, router: RequestRouter, replicas: SessionReplicas, source_of: Callable[[str], AdaptiveDraftSource]
    ) -> None:
        """
        Args:
            router: router of the request.
            replicas: replicas of the session; `draft_pool` is the first pool.
            source_of: makes the source of a pool.
        """
        self._router = router
        self._replicas = replicas
        self._source_of = source_of
        self._sources = {replicas.draft_pool: source_of(replicas.draft_pool)}
        self._missing_cause = ""
        """Cause of the last round's missing draft."""
        self._was_in_target = False
        """True if the target itself was to make the last draft. A target that lacks the pool will never serve it."""

    @property
    def chooser(self) -> GammaChooser:
        """Chooser of the present pool."""
        return self._source.chooser

    async def propose(self, round_id: int, limit: int, committed_len: int, forced: Sequence[int] = ()) -> Draft:
        """See `DraftSource.propose`."""
        pool = self._replicas.draft_pool
        if self._missing_cause in _GONE:
            following = self._router.leave(pool, for_good=self._was_in_target or self._missing_cause == _OUTGROWN)
        else:
            following = self._router.next_pool(pool, limit if self.chooser.most(limit) else 0)
        if following and following != pool:
            self._replicas.draft_pool = following
            if following not in self._sources:
                self._sources[following] = self._source_of(following)
        draft = await self._source.propose(round_id, limit, committed_len, forced)
        self._missing_cause = draft.missing_cause
        return draft

    def complete(self, draft: Draft, target: TargetAnswer) -> Draft:
        """See `DraftSource.complete`."""
        return self._source.complete(draft, target)

    def observe(self, draft: Draft, times: RoundTimes) -> None:
        """See `DraftSource.observe`."""
        self._missing_cause, self._was_in_target = draft.missing_cause, draft.local is not None
        self._source.observe(draft, times)

    def wants_draft(self, limit: int) -> bool:
        """See `DraftSource.wants_draft`."""
        return self._source.wants_draft(limit)

    def observe_run_step(self, times: RunStepTimes) -> None:
        """See `DraftSource.observe_run_step`."""
        self._source.observe_run_step(times)

    @property
    def _source(self) -> AdaptiveDraftSource:
        return self._sources[self._replicas.draft_pool]
