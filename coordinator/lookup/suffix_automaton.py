"""A suffix automaton of a growing token sequence: its substrings, their counts, and the tokens that followed them.

Each state stands for the substrings that end at the same positions. Its suffix link leads to the longest suffix of them
that ends at further positions too. So the link of the state of the whole sequence is its longest repeated suffix, which
is found without a search. Appending a token takes constant time on average, and adds at most two states. `history`
limits the number of tokens, and `lookup` makes drafts.

Source: Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

#: Token that separates sequences inside an automaton. No search contains it.
SEPARATOR = -1

#: Number of suffixes that are counted per token, longest first. A run of one token has as many suffixes as tokens, but
#: searches use the longest ones.
MAX_COUNTED_SUFFIXES = 32

_ROOT = 0
_NONE = -1
_MANY = -2


class Match(NamedTuple):
    """The longest suffix of some sequence that an automaton contains."""

    state: int = _ROOT
    length: int = 0
    """Number of tokens of the suffix."""


class SuffixAutomaton:
    """The automaton. Tokens are appended at its end. Not thread-safe."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._last = _ROOT
        self._link = array("i", [_NONE])
        self._length = array("i", [0])
        """Length of the longest substring of each state."""
        self._count = array("i", [0])
        self._end = array("i", [0])
        """Number of tokens up to the last occurrence of each state."""
        # Most states have one transition, which is kept in two arrays. Further transitions are in a dict per state.
        self._only_token = array("i", [_NONE])
        self._only_next = array("i", [_NONE])
        self._ways: dict[int, dict[int, int]] = {}
        self._earlier_end = 0

    def __len__(self) -> int:
        """Return the number of appended tokens, separators included."""
        return self._num_tokens

    @property
    def longest_repeat(self) -> Match:
        """Longest suffix of the sequence that also occurs earlier; the occurrences may overlap."""
        link = self._link[self._last]
        return Match() if link <= _ROOT else Match(link, self._length[link])

    @property
    def earlier_end(self) -> int:
        """Number of tokens up to the end of the previous occurrence of `longest_repeat`; 0 if nothing repeats."""
        return self._earlier_end

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens: ids from 0 on, or SEPARATOR."""
        for token_id in token_ids:
            self._append(token_id)

    def advance(self, match: Match, token_id: int) -> Match:
        """Return the match of a sequence after one more token."""
        state, length = match
        while state != _ROOT and self._next(state, token_id) == _NONE:
            state = self._link[state]
            # The match may stay as long: the automaton may have grown since, and a state may have been split.
            length = min(length, self._length[state])
        following = self._next(state, token_id)
        return Match() if following == _NONE else Match(following, length + 1)

    def continuation(self, match: Match, max_tokens: int, least_probability: float) -> list[int]:
        """Return the most frequent continuation of a match, token by token; of equally frequent ones, the latest.

        Args:
            match: match in this automaton.
            max_tokens: largest number of tokens to return.
            least_probability: the continuation ends if the product of its tokens' shares falls below this. The share
                of a token is its count divided by the count of all tokens that followed the same match.
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
        """Return the number of occurrences of a match. It is too low for the shortest suffixes of long runs."""
        return self._count[match.state]

    def _most_frequent(self, state: int) -> tuple[int, int, float]:
        """Return the most frequent token after a state, the state it leads to (_NONE: none), and its share."""
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
        """Return the state of a state's longest substring extended by a token that has followed it."""
        following, length = self._next(state, token_id), self._length[state] + 1
        if self._length[following] == length:
            return following
        # Its longer substrings end at fewer positions from now on, so the shorter ones get a state of their own.
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
        """Return the state after a token; _NONE if the token has not followed."""
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
