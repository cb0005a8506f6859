"""Drafts that are found in text, without a call to a model, and the choice between them and a model's drafts.

A found draft is a point mass at every token: S = {x} (docs/protocol.md sections 3 and 9). Its tokens cost nothing to
draft, but exist in some rounds only. So the two kinds of drafts are compared by the tokens per second that a round of
each makes. The search itself is in `coordinator.lookup`; the draft goes back to the `runner`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.lookup.lookup import MOST_READ_AT_ONCE, Lookup
from coordinator.round.draft_calls import Draft
from coordinator.round.draft_sources import AdaptiveDraftSource
from coordinator.round.gamma import GammaChooser
from coordinator.round.pool_stats import RoundTimes, RunStepTimes
from coordinator.round.session_tokens import SessionTokens
from coordinator.round.target_calls import TargetAnswer
from specdec.contract.types import Proposal, Support

#: While a model's draft is faster, a found draft is tried once in this many rounds in which there was one.
ROUNDS_PER_TRIAL = 16

#: Number of tokens without a match after which text is searched again. The target runs ahead by as many.
RUN_PORTION = 2

_WEIGHT = np.ones(1, dtype=np.uint16)


class LookupDraftSource:
    """Drafts found in text. Implements `DraftSource`."""

    def __init__(
        self,
        pool: str,
        lookup: Lookup,
        tokens: SessionTokens,
        chooser: GammaChooser,
        otherwise: AdaptiveDraftSource | None,
        *,
        with_supports: bool,
    ) -> None:
        """
        Args:
            pool: name of the pool of found drafts.
            lookup: searches the session's text.
            tokens: tokens of the session.
            chooser: chooser of gamma for found drafts alone.
            otherwise: source to use if nothing is found; None for none.
            with_supports: whether the request's rounds carry distributions.
        """
        self._pool = pool
        self._lookup = lookup
        self._tokens = tokens
        self._chooser = chooser
        self._otherwise = otherwise
        self._with_supports = with_supports
        self._rounds_without = 0

    async def propose(self, round_id: int, limit: int, committed_len: int, forced: Sequence[int] = ()) -> Draft:
        """See `DraftSource.propose`."""
        token_ids = self._find(limit, forced)
        if token_ids:
            proposal = point_masses(token_ids, self._with_supports)
            return Draft(proposal, num_requested=len(token_ids), pool=self._pool)
        if self._otherwise is not None:
            draft = await self._otherwise.propose(round_id, limit, committed_len, forced)
            return draft._replace(run_portion=min(draft.run_portion, RUN_PORTION))
        return Draft(missing_cause="no_match", pool=self._pool, run_portion=RUN_PORTION)

    def complete(self, draft: Draft, target: TargetAnswer) -> Draft:
        """See `DraftSource.complete`; a found draft is complete already."""
        if draft.pool == self._pool or self._otherwise is None:
            return draft
        return self._otherwise.complete(draft, target)

    def observe(self, draft: Draft, times: RoundTimes) -> None:
        """See `DraftSource.observe`."""
        if draft.pool == self._pool or self._otherwise is None:
            self._chooser.observe(times)
        else:
            self._otherwise.observe(draft, times)

    def wants_draft(self, limit: int) -> bool:
        """See `DraftSource.wants_draft`."""
        return bool(self._find(limit)) or (self._otherwise is not None and self._otherwise.wants_draft(limit))

    def observe_run_step(self, times: RunStepTimes) -> None:
        """See `DraftSource.observe_run_step`."""
        if self._otherwise is None:
            self._chooser.observe_run_step(times)
        else:
            self._otherwise.observe_run_step(times)

    def _find(self, limit: int, forced: Sequence[int] = ()) -> list[int]:
        """Return at most `limit` found tokens that are worth a round; none if nothing is found."""
        self._read(forced)
        gamma = self._gamma(limit)
        if self._lookup.num_read < len(self._tokens) or not gamma:
            return []
        token_ids = self._lookup.find(gamma)
        if token_ids and self._otherwise is not None and not self._is_better(len(token_ids), limit):
            self._rounds_without += 1
            if self._rounds_without < ROUNDS_PER_TRIAL:
                return []
        self._rounds_without = 0 if token_ids else self._rounds_without
        return token_ids

    def _gamma(self, limit: int) -> int:
        """Return the number of tokens to find. Beside a model's draft it is the maximum, because the alternative to a
        found draft is then the model's, not a round without any."""
        return self._chooser.choose(limit) if self._otherwise is None else self._chooser.most(limit)

    def _is_better(self, num_found: int, limit: int) -> bool:
        """Return whether a round of found tokens makes more tokens per second than one of the model's."""
        assert self._otherwise is not None
        models = self._otherwise.chooser.best_rate(limit)
        found = self._chooser.best_rate(num_found)
        return models is None or found is None or found >= models

    def _read(self, forced: Sequence[int]) -> None:
        """Read the tokens that were committed since the last call, up to a limit that bounds the delay of the round.

        Forced tokens are read once all others are: they will be committed, whatever else the round decides.
        """
        start = self._lookup.num_read
        if start < len(self._tokens):
            self._lookup.read(self._tokens.tail(start)[:MOST_READ_AT_ONCE].tolist())
        num_ahead = self._lookup.num_read - len(self._tokens)
        if 0 <= num_ahead < len(forced):
            self._lookup.read(forced[num_ahead:])


def point_masses(token_ids: Sequence[int], with_supports: bool) -> Proposal:
    """Return a draft that is certain of each of its tokens."""
    ids = np.array(token_ids, dtype=np.uint32)
    supports = tuple(Support(ids[index : index + 1], _WEIGHT) for index in range(len(ids))) if with_supports else ()
    return Proposal(
        draft_token_ids=ids,
        supports=supports,
        lost_mass=(0.0,) * len(supports),
        kv_len=0,
        num_cached_tokens=0,
        forward_s=0.0,
    )
