"""What may come next in a session, found in text that was there before: drafts without a model.

`ngram` looks at the session's own text: what followed the last earlier place of its longest repeated suffix. `suffix`
looks at what its tenant's other sessions have said as well, and takes what has followed most often. Decided from
committed tokens alone (docs/protocol.md section 9). Not here: what is made of it (`round/lookup_drafts`).

Source: Saxena, "Prompt Lookup Decoding", 2023; Oliaro et al., "SuffixDecoding", 2024 (arXiv:2411.04975).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from coordinator.lookup.history import TokenHistory
from coordinator.lookup.suffix_automaton import Match, SuffixAutomaton

#: Shorter matches say next to nothing.
LEAST_MATCH = 2

#: Draft tokens for each matched one, at most: a short match ends soon.
TOKENS_PER_MATCHED = 2

#: A draft of `suffix` ends where what was seen makes the whole of it less likely than this.
LEAST_PROBABILITY = 0.2

#: Tokens of a session that are read before one round, at most: some ten milliseconds. A long prompt takes several.
MOST_READ_AT_ONCE = 2048

#: Where the history is another one than before, this much of the session's end is matched against it anew.
_REMATCHED = 64


class LookupKind(StrEnum):
    """Pools of drafts that need no replica, by their names."""

    NGRAM = "ngram"
    SUFFIX = "suffix"


class _Place(NamedTuple):
    """Where a session stands in one automaton of the history."""

    automaton: SuffixAutomaton
    match: Match


class Lookup:
    """Finds drafts for one session. Give it the session's tokens as they come."""

    def __init__(self, kind: LookupKind, history: TokenHistory | None) -> None:
        """`history`: of the session's tenant, for `suffix`; None: the session's own text alone."""
        self._kind = kind
        self._history = history if kind is LookupKind.SUFFIX else None
        self._own = SuffixAutomaton()
        self._token_ids: list[int] = []
        self._places: list[_Place] = []

    @property
    def num_read(self) -> int:
        """Tokens of the session that are known here."""
        return len(self._token_ids)

    def read(self, token_ids: Sequence[int]) -> None:
        """Takes in the session's next tokens."""
        self._own.extend(token_ids)
        self._token_ids.extend(token_ids)
        self._follow_history(token_ids)

    def find(self, max_tokens: int) -> list[int]:
        """Draft tokens that may follow all that was read, none where nothing that is worth it was found."""
        if self._kind is LookupKind.NGRAM:
            return self._last_repeat(max_tokens)
        candidates = [_Place(self._own, self._own.longest_repeat), *self._places]
        best = max(candidates, key=lambda place: place.match.length)  # the first of equals: the session's own
        length = best.match.length
        if length < LEAST_MATCH:
            return []
        return best.automaton.continuation(best.match, min(max_tokens, TOKENS_PER_MATCHED * length), LEAST_PROBABILITY)

    def _last_repeat(self, max_tokens: int) -> list[int]:
        length, end = self._own.longest_repeat.length, self._own.earlier_end
        if length < LEAST_MATCH:
            return []
        period = len(self._token_ids) - end  # a repeat that overlaps itself goes on as it began
        count = min(max_tokens, TOKENS_PER_MATCHED * length)
        return [self._token_ids[end + offset % period] for offset in range(count)]

    def _follow_history(self, token_ids: Sequence[int]) -> None:
        if self._history is None:
            return
        known = {id(place.automaton): place.match for place in self._places}
        self._places = []
        for automaton in (self._history.newer, self._history.older):
            match, new = known.get(id(automaton)), token_ids
            if match is None or len(new) > _REMATCHED:
                match, new = Match(), self._token_ids[-_REMATCHED:]
            for token_id in new:
                match = automaton.advance(match, token_id)
            self._places.append(_Place(automaton, match))
