"""The automaton in which drafts are looked up, compared with searches of the plain text."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from coordinator.lookup.suffix_automaton import SEPARATOR, Match, SuffixAutomaton

TEXTS = st.lists(st.integers(0, 3), max_size=30)


def places(text: list[int], part: list[int]) -> list[int]:
    """Return the positions in `text` at which `part` ends."""
    return [end for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part]


def longest_known_suffix(text: list[int], ending: list[int]) -> list[int]:
    return next(ending[start:] for start in range(len(ending) + 1) if places(text, ending[start:]))


@given(TEXTS)
def test_the_longest_repeated_suffix_and_its_places_are_found(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end in range(1, len(text) + 1):
        automaton.extend(text[end - 1 : end])
        seen = text[:end]
        suffixes = [seen[start:] for start in range(1, end)]
        repeat = next((suffix for suffix in suffixes if len(places(seen, suffix)) > 1), [])
        match = automaton.longest_repeat
        assert match.length == len(repeat)
        if repeat:
            assert automaton.count(match) == len(places(seen, repeat))
            assert automaton.earlier_end == places(seen, repeat)[-2]
    assert len(automaton) == len(text)


@given(TEXTS, TEXTS)
def test_another_text_is_matched_one_token_at_a_time(text: list[int], other: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    match = Match()
    for end in range(1, len(other) + 1):
        match = automaton.advance(match, other[end - 1])
        assert match.length == len(longest_known_suffix(text, other[:end]))


@given(TEXTS, TEXTS)
def test_a_match_stays_valid_while_the_automaton_grows(text: list[int], other: list[int]) -> None:
    automaton = SuffixAutomaton()
    match = Match()
    grown: list[int] = []
    for index, token_id in enumerate(other):
        automaton.extend(text[index : index + 1])
        grown += text[index : index + 1]
        match = automaton.advance(match, token_id)
        # Text added after a token was matched is not searched again, so the match may be shorter but is never wrong.
        assert places(grown, other[index + 1 - match.length : index + 1]) or not match.length
        for following in automaton.continuation(match, 3, 0.0):
            assert following in grown


@given(TEXTS.filter(bool))
def test_each_token_of_a_continuation_is_the_most_frequent_one_there(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend([*text, SEPARATOR])
    for start in range(len(text)):
        match = Match()
        for token_id in text[start : start + 2]:
            match = automaton.advance(match, token_id)
        path = text[start : start + 2]
        # The state stands for the longest text with these positions, and the same tokens follow all its texts.
        for token_id in automaton.continuation(match, 5, 0.0):
            followers = Counter(text[end] for end in places(text, path) if end < len(text))
            assert followers[token_id] == max(followers.values())
            path.append(token_id)


def test_a_continuation_ends_where_it_becomes_unlikely_or_the_text_ends() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 3, SEPARATOR, 1, 2, 4, SEPARATOR, 1, 2, 4, 9, SEPARATOR])
    match = automaton.advance(Match(), 1)
    assert automaton.continuation(match, 8, 0.0) == [2, 4, 9]
    assert automaton.continuation(match, 2, 0.0) == [2, 4]
    assert automaton.continuation(match, 8, 0.5) == [2, 4]  # 1, then 2/3, then 1/2 of that, since a text ended there
    assert automaton.continuation(match, 8, 0.7) == [2]
    assert automaton.continuation(Match(), 0, 0.0) == []


def test_of_equally_frequent_followers_the_latest_is_taken() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([5, 6, 1, 5, 7, 2, SEPARATOR])
    assert automaton.continuation(automaton.advance(Match(), 5), 1, 0.0) == [7]


def test_a_run_of_one_token_costs_no_more_than_its_length() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([3] * 20_000)  # takes minutes without a bound on counting
    assert automaton.longest_repeat.length == 19_999
    assert automaton.continuation(automaton.longest_repeat, 4, 0.0) == [3]  # no token has followed the whole run yet
