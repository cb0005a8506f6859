"""Where a round's draft tokens come from: the one contract, and the draft that is a model's.

A source chooses how many tokens are worth it, gets them, and learns from what became of them. The decision never asks
which one it was: a draft is tokens and what they were drawn from (docs/protocol.md section 9). A model's draft is asked
for by `draft_calls`; what it gave goes back to `runner`, to be verified. Not here: drafts found in text
(`lookup_drafts`), the target's own (`local_drafts`), the call to a replica (`draft_calls`), the choice of gamma
(`gamma`). Called by `runner`.
"""

from __future__ import annotations

from typing import Protocol

from coordinator.round.draft_calls import DraftAnswer, DraftCalls
from coordinator.round.gamma import GammaChooser, RoundTimes
from specdec.rpc.calls import WireStats


class DraftSource(Protocol):
    """Gives drafts for the rounds of one request."""

    async def propose(self, round_id: int, limit: int, committed_len: int, wire: WireStats) -> DraftAnswer:
        """Draft tokens for a round. Whatever goes wrong, the answer is an empty proposal.

        Args:
            round_id: of the round.
            limit: tokens beyond which none can be emitted.
            committed_len: of the session.
            wire: counts the calls' bytes.
        """
        ...

    def observe(self, draft: DraftAnswer, times: RoundTimes) -> None:
        """Learns what became of an answer."""
        ...


class AdaptiveDraftSource(DraftSource, Protocol):
    """Those that somebody is asked for, as many as pay: a draft replica, or the target itself."""

    @property
    def chooser(self) -> GammaChooser: ...


class ReplicaDraftSource:
    """A draft replica's tokens, as many as pay."""

    def __init__(self, pool: str, chooser: GammaChooser, calls: DraftCalls) -> None:
        """`chooser`: of the draft pool `pool`."""
        self.chooser = chooser
        self._pool = pool
        self._calls = calls

    async def propose(self, round_id: int, limit: int, committed_len: int, wire: WireStats) -> DraftAnswer:
        """See `DraftSource`."""
        draft = await self._calls.propose(round_id, self.chooser.choose(limit), committed_len, wire)
        return draft._replace(pool=self._pool)

    def observe(self, draft: DraftAnswer, times: RoundTimes) -> None:
        """See `DraftSource`."""
        self.chooser.observe(times)
