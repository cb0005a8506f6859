"""Every substring of a growing token sequence, how often each was seen, and what has followed it.

A suffix automaton: each state stands for the substrings that end at the same places, and its suffix link leads to the
longest of their suffixes that ends at more. So the link of the whole sequence's own state is its longest suffix that
was there before, found without a search. A token costs constant time on average; there are at most two states a token.

Not here: whose tokens these are and how many are kept (`history`), what is drafted of them (`lookup_drafts`).

Source: Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

#: Ends a sequence inside an automaton: no substring that is asked for contains it.
SEPARATOR = -1

#: How many of a token's suffixes are counted, longest first. There may be as many as tokens (a run of one token), but
#: what is asked for is near the longest.
MAX_COUNTED_SUFFIXES = 32

_ROOT = 0
_NONE = -1
_MANY = -2


class Match(NamedTuple):
    """The longest suffix of some sequence that an automaton knows."""

    state: int = _ROOT
    length: int = 0
    """Tokens of the suffix."""


class SuffixAutomaton:
    """Grows at its end. Not thread-safe."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._last = _ROOT
        self._link = array("i", [_NONE])
        self._length = array("i", [0])
        """Of the longest substring of each state."""
        self._count = array("i", [0])
        self._end = array("i", [0])
        """Where each state was seen last: tokens up to there."""
        # A state with one way on keeps it in two numbers, which most have; more ways are in a dict of their own.
        self._only_token = array("i", [_NONE])
        self._only_next = array("i", [_NONE])
        self._ways: dict[int, dict[int, int]] = {}
        self._earlier_end = 0

    def __len__(self) -> int:
        """Tokens appended, separators included."""
        return self._num_tokens

    @property
    def longest_repeat(self) -> Match:
        """The longest suffix of the sequence that it also has elsewhere; it may overlap itself."""
        link = self._link[self._last]
        return Match() if link <= _ROOT else Match(link, self._length[link])

    @property
    def earlier_end(self) -> int:
        """Tokens up to the end of the last earlier place of `longest_repeat`; 0 where nothing repeats."""
        return self._earlier_end

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens, ids of 0 and above or SEPARATOR."""
        for token_id in token_ids:
            self._append(token_id)

    def advance(self, match: Match, token_id: int) -> Match:
        """The match of a sequence that has grown by a token."""
        state, length = match
        while state != _ROOT and self._next(state, token_id) == _NONE:
            state = self._link[state]
            # Not always shorter: the automaton may have grown since, and a state been divided.
            length = min(length, self._length[state])
        following = self._next(state, token_id)
        return Match() if following == _NONE else Match(following, length + 1)

    def continuation(self, match: Match, max_tokens: int, least_probability: float) -> list[int]:
        """What has most often followed a match, token by token; of equals, what has lately.

        Args:
            match: of this automaton.
            max_tokens: of the answer.
            least_probability: the answer ends where the product of its tokens' shares falls below. A token's share is
                its count over that of all that followed the same.
        """
        token_ids: list[int] = []
        state, probability = match.state, 1.0
        while len(token_ids) < max_tokens:
            token_id, following, share = self._most_frequent(state)
            probability *= share
            if following == _NONE or probability < least_probability:
                break
            token_ids.append(token_id)
            state = following
        return token_ids

    def count(self, match: Match) -> int:
        """How often the matched substring was seen. For the shortest suffixes of long runs too few are counted."""
        return self._count[match.state]

    def _most_frequent(self, state: int) -> tuple[int, int, float]:
        """The token seen most often after a state, the state it leads to (_NONE: none), and its share."""
        if self._only_token[state] != _MANY:
            token_id, following = self._only_token[state], self._only_next[state]
            return (token_id, following, 1.0) if token_id != SEPARATOR else (SEPARATOR, _NONE, 0.0)
        total, best = 0, (0, 0, SEPARATOR, _NONE)
        for token_id, following in self._ways[state].items():
            total += self._count[following]
            if token_id != SEPARATOR:
                best = max(best, (self._count[following], self._end[following], token_id, following))
        return best[2], best[3], best[0] / total

    def _append(self, token_id: int) -> None:
        self._num_tokens += 1
        new = self._add_state(self._num_tokens)
        state, link = self._last, self._link
        while state != _NONE and self._next(state, token_id) == _NONE:
            self._set_next(state, token_id, new)
            state = link[state]
        link[new] = _ROOT if state == _NONE else self._suffix_of(state, token_id)
        self._last = new
        self._count_suffixes(new)

    def _suffix_of(self, state: int, token_id: int) -> int:
        """The state of a state's longest substring and a token that has followed it."""
        following, length = self._next(state, token_id), self._length[state] + 1
        if self._length[following] == length:
            return following
        # Its longer substrings end at fewer places from now on: the shorter ones get a state of their own.
        shorter = self._add_state(length)
        self._count[shorter], self._end[shorter] = self._count[following], self._end[following]
        self._only_token[shorter], self._only_next[shorter] = self._only_token[following], self._only_next[following]
        if following in self._ways:
            self._ways[shorter] = self._ways[following].copy()
        self._link[shorter] = self._link[following]
        self._link[following] = shorter
        while state != _NONE and self._next(state, token_id) == following:
            self._set_next(state, token_id, shorter)
            state = self._link[state]
        return shorter

    def _count_suffixes(self, new: int) -> None:
        self._earlier_end = self._end[self._link[new]] if self._link[new] > _ROOT else 0
        state = new
        for _ in range(MAX_COUNTED_SUFFIXES):
            self._count[state] += 1
            self._end[state] = self._num_tokens
            state = self._link[state]
            if state <= _ROOT:
                break

    def _add_state(self, length: int) -> int:
        self._link.append(_NONE)
        self._length.append(length)
        self._count.append(0)
        self._end.append(0)
        self._only_token.append(_NONE)
        self._only_next.append(_NONE)
        return len(self._link) - 1

    def _next(self, state: int, token_id: int) -> int:
        """The state after a token; _NONE: the token has not followed."""
        if self._only_next[state] == _NONE:
            return _NONE
        if self._only_token[state] == _MANY:
            return self._ways[state].get(token_id, _NONE)
        return self._only_next[state] if self._only_token[state] == token_id else _NONE

    def _set_next(self, state: int, token_id: int, following: int) -> None:
        if self._only_next[state] == _NONE or self._only_token[state] == token_id:
            self._only_token[state], self._only_next[state] = token_id, following
            return
        if self._only_token[state] != _MANY:
            self._ways[state] = {self._only_token[state]: self._only_next[state]}
            self._only_token[state] = _MANY
        self._ways[state][token_id] = following
