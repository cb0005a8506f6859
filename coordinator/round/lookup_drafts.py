"""A round's draft found in text, without a call; where nothing is found, or a model's draft pays better, that one.

What was found is a point mass for every token: S = {x} (docs/protocol.md sections 3 and 9). Its tokens cost nothing to
draft and only some of them are there in a round, so that they are compared with a model's by what a round of each makes
a second. Either goes back to `runner`, to be verified. Not here: the search (`coordinator.lookup`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.lookup.lookup import MOST_READ_AT_ONCE, Lookup
from coordinator.round.draft_calls import DraftAnswer
from coordinator.round.draft_source import AdaptiveDraftSource
from coordinator.round.gamma import GammaChooser, RoundTimes
from coordinator.round.tokens import SessionTokens
from specdec.rpc.calls import WireStats
from specdec.types import Proposal, Support

#: While a model's draft pays better, what was found is tried once in so many rounds in which something was.
ROUNDS_PER_TRIAL = 16

_WEIGHT = np.ones(1, dtype=np.uint16)


class LookupDraftSource:
    """Implements `DraftSource`."""

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
            pool: the name that these drafts go by.
            lookup: of the session.
            tokens: the session's.
            chooser: of these drafts alone.
            otherwise: asked where nothing is found; None: nobody is.
            with_supports: whether the request's rounds carry distributions.
        """
        self._pool = pool
        self._lookup = lookup
        self._tokens = tokens
        self._chooser = chooser
        self._otherwise = otherwise
        self._with_supports = with_supports
        self._rounds_without = 0

    async def propose(self, round_id: int, limit: int, committed_len: int, wire: WireStats) -> DraftAnswer:
        """See `DraftSource`."""
        token_ids = self._find(limit)
        if token_ids:
            return DraftAnswer(_point_masses(token_ids, self._with_supports), num_asked=len(token_ids), pool=self._pool)
        if self._otherwise is not None:
            return await self._otherwise.propose(round_id, limit, committed_len, wire)
        return DraftAnswer(missing_cause="no_match", pool=self._pool)

    def observe(self, draft: DraftAnswer, times: RoundTimes) -> None:
        """See `DraftSource`."""
        if draft.pool == self._pool or self._otherwise is None:
            self._chooser.observe(times)
        else:
            self._otherwise.observe(draft, times)

    def _find(self, limit: int) -> list[int]:
        """What was found and is worth a round, at most `limit` tokens."""
        self._read()
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
        """Where a model's draft stands by, that is the alternative to a found one, not a round without any."""
        return self._chooser.choose(limit) if self._otherwise is None else self._chooser.most(limit)

    def _is_better(self, num_found: int, limit: int) -> bool:
        """Whether a round of found tokens makes more a second than one of the model's."""
        assert self._otherwise is not None
        models = self._otherwise.chooser.best_rate(limit)
        found = self._chooser.best_rate(num_found)
        return models is None or found is None or found >= models

    def _read(self) -> None:
        """Takes in what was committed since, so much at most that nobody waits for it."""
        start = self._lookup.num_read
        if start < len(self._tokens):
            self._lookup.read(self._tokens.tail(start)[:MOST_READ_AT_ONCE].tolist())


def _point_masses(token_ids: Sequence[int], with_supports: bool) -> Proposal:
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
