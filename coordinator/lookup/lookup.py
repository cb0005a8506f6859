"""The search for drafts in earlier text, without a model.

`ngram` searches the session's own text: it returns what followed the previous occurrence of the longest repeated
suffix. `suffix` searches the outputs of the tenant's other sessions as well, and returns what has followed most often.
Both depend on committed tokens alone (docs/protocol.md section 9). `round/lookup_drafts` makes drafts of what is found.

Source: Saxena, "Prompt Lookup Decoding", 2023; Oliaro et al., "SuffixDecoding", 2024 (arXiv:2411.04975).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from coordinator.lookup.history import TokenHistory
from coordinator.lookup.suffix_automaton import Match, SuffixAutomaton

#: Number of tokens of the shortest useful match.
LEAST_MATCH = 2

#: Largest number of draft tokens per matched token; the continuation of a short match is soon wrong.
TOKENS_PER_MATCHED = 2

#: A draft of `suffix` ends if its probability, by the counts in the text, falls below this.
LEAST_PROBABILITY = 0.2

#: Largest number of session tokens that are read before one round, which takes about 10 ms. A long prompt takes several
#: rounds.
MOST_READ_AT_ONCE = 2048

#: Number of tokens at the session's end that are matched again if the automata of the history have changed.
_REMATCHED = 64


class LookupKind(StrEnum):
    """Pools of drafts found in text, by their names."""

    NGRAM = "ngram"
    SUFFIX = "suffix"


class _Place(NamedTuple):
    """The match of a session's end in one automaton."""

    automaton: SuffixAutomaton
    match: Match


class Lookup:
    """Searches drafts for one session, whose tokens are passed to `read` as they are committed."""

    def __init__(self, kind: LookupKind, history: TokenHistory | None) -> None:
        """`history`: text of the tenant's sessions, for `suffix`; None: the session's own text alone."""
        self._kind = kind
        self._history = history if kind is LookupKind.SUFFIX else None
        self._own = SuffixAutomaton()
        self._token_ids: list[int] = []
        self._places: list[_Place] = []

    @property
    def num_read(self) -> int:
        """Number of session tokens that have been read."""
        return len(self._token_ids)

    def read(self, token_ids: Sequence[int]) -> None:
        """Read the session's next tokens."""
        self._own.extend(token_ids)
        self._token_ids.extend(token_ids)
        self._follow_history(token_ids)

    def find(self, max_tokens: int) -> list[int]:
        """Return at most `max_tokens` draft tokens that may follow the tokens read; none if no match is useful."""
        if self._kind is LookupKind.NGRAM:
            return self._last_repeat(max_tokens)
        candidates = [_Place(self._own, self._own.longest_repeat), *self._places]
        best = max(candidates, key=lambda place: place.match.length)  # of equal ones the first, the session's own text
        length = best.match.length
        if length < LEAST_MATCH:
            return []
        return best.automaton.continuation(best.match, min(max_tokens, TOKENS_PER_MATCHED * length), LEAST_PROBABILITY)

    def _last_repeat(self, max_tokens: int) -> list[int]:
        length, end = self._own.longest_repeat.length, self._own.earlier_end
        if length < LEAST_MATCH:
            return []
        period = len(self._token_ids) - end  # a repeat that overlaps itself continues periodically
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
