"""Drafts that the target makes by itself, before it verifies them in the same call: one trip instead of two.

The number of tokens is chosen as for a draft replica, by what drafting them took there; the wait for the call itself is
the verification's. Whether a target can draft is its own matter: one that lost or lacks the pool verifies a target-only
step, and so does one that has not run enough of the session. What is asked for goes by way of `runner` into the
verification (`target_calls`). Not here: the call (`target_calls`), what became of the draft (`runner`, which puts it in
the place of this answer). Called by `runner`.
"""

from __future__ import annotations

from coordinator.round.draft_calls import DraftAnswer
from coordinator.round.gamma import GammaChooser, RoundTimes
from specdec.rpc.calls import WireStats
from specdec.types import LocalDraft


class InTargetDraftSource:
    """Implements `DraftSource`."""

    def __init__(self, pool: str, chooser: GammaChooser) -> None:
        """`chooser`: of the targets' local drafts called `pool`."""
        self.chooser = chooser
        self._pool = pool

    async def propose(self, round_id: int, limit: int, committed_len: int, wire: WireStats) -> DraftAnswer:
        """See `DraftSource`; nothing is asked yet."""
        gamma = self.chooser.choose(limit)
        if gamma < 1:
            return DraftAnswer(missing_cause="off", pool=self._pool)
        return DraftAnswer(local=LocalDraft(self._pool, gamma), pool=self._pool)

    def observe(self, draft: DraftAnswer, times: RoundTimes) -> None:
        """See `DraftSource`."""
        self.chooser.observe(times)
