"""Drafts found in text: what is found, in which sessions' text, and how much text is kept."""

from __future__ import annotations

import pytest

from coordinator.lookup.history import MAX_TENANTS, TokenHistories, TokenHistory
from coordinator.lookup.lookup import LEAST_MATCH, Lookup, LookupKind

SENTENCE = [10, 11, 12, 13, 14, 15, 16]


def lookup_of(kind: LookupKind, token_ids: list[int], history: TokenHistory | None = None) -> Lookup:
    lookup = Lookup(kind, history)
    lookup.read(token_ids)
    return lookup


async def history_of(*texts: list[int], max_tokens: int = 1000) -> TokenHistory:
    history = TokenHistory(max_tokens)
    for text in texts:
        history.add(text)
        await history.settle()
    return history


@pytest.mark.parametrize("kind", LookupKind)
def test_what_followed_the_same_tokens_in_the_session_is_found(kind: LookupKind) -> None:
    lookup = lookup_of(kind, [*SENTENCE, 99, *SENTENCE[:3]])
    assert lookup.find(4) == SENTENCE[3:7]
    assert lookup.find(2) == SENTENCE[3:5]
    lookup.read(SENTENCE[3:5])
    assert lookup.find(2) == SENTENCE[5:7]


@pytest.mark.parametrize("kind", LookupKind)
def test_a_match_that_is_too_short_gives_nothing(kind: LookupKind) -> None:
    assert LEAST_MATCH == 2
    assert lookup_of(kind, [1, 2, 3, 1]).find(4) == []
    assert lookup_of(kind, []).find(4) == []


def test_ngram_uses_the_latest_occurrence_and_suffix_the_most_frequent_continuation() -> None:
    text = [7, 8, 1, 50, 7, 8, 1, 51, 7, 8, 2, 52, 7, 8]
    assert lookup_of(LookupKind.NGRAM, text).find(1) == [2]
    assert lookup_of(LookupKind.SUFFIX, text).find(1) == [1]


def test_a_repeat_that_overlaps_itself_is_continued_periodically() -> None:
    assert lookup_of(LookupKind.NGRAM, [4, 1, 2, 3, 1, 2, 3, 1]).find(5) == [2, 3, 1, 2, 3]


async def test_suffix_searches_the_tenants_other_outputs_and_ngram_does_not() -> None:
    history = await history_of(SENTENCE)
    assert lookup_of(LookupKind.SUFFIX, [1, 2, *SENTENCE[:3]], history).find(8) == SENTENCE[3:]
    assert lookup_of(LookupKind.NGRAM, [1, 2, *SENTENCE[:3]], history).find(8) == []


async def test_text_that_is_added_to_the_history_later_is_found_from_then_on() -> None:
    history = TokenHistory(1000)
    lookup = lookup_of(LookupKind.SUFFIX, [1, 2], history)
    history.add(SENTENCE)
    await history.settle()
    lookup.read(SENTENCE[:3])
    assert lookup.find(8) == SENTENCE[3:]


async def test_the_longer_match_wins_and_the_sessions_own_text_wins_a_tie() -> None:
    history = await history_of([5, 6, 7, 60])
    assert lookup_of(LookupKind.SUFFIX, [5, 6, 7, 61, 5, 6, 7], history).find(1) == [61]
    assert lookup_of(LookupKind.SUFFIX, [6, 7, 61, 5, 6, 7], history).find(1) == [60]


async def test_two_outputs_are_not_read_as_one_text() -> None:
    history = await history_of([1, 2, 3], [4, 5, 6])
    assert lookup_of(LookupKind.SUFFIX, [2, 3], history).find(4) == []


async def test_the_history_is_bounded_and_forgets_the_oldest() -> None:
    history = await history_of(SENTENCE, max_tokens=40)
    for start in range(100, 200, 10):
        history.add(list(range(start, start + 10)))
        await history.settle()
        assert len(history.newer) + len(history.older) <= 40 + 20
    assert lookup_of(LookupKind.SUFFIX, SENTENCE[:3], history).find(4) == []
    assert lookup_of(LookupKind.SUFFIX, [190, 191, 192], history).find(2) == [193, 194]


async def test_a_session_is_matched_again_in_a_new_automaton_of_the_history() -> None:
    history = TokenHistory(100)
    lookup = lookup_of(LookupKind.SUFFIX, [1, 10, 11], history)
    for start in (200, 300, 10, 400):
        history.add(list(range(start, start + 20)))
        await history.settle()
        lookup.read([12] if start == 10 else [])
    lookup.read([13])
    assert lookup.find(3) == [14, 15, 16]


async def test_text_beyond_the_limit_is_dropped() -> None:
    history = TokenHistory(40)
    history.add(list(range(1000)))
    await history.settle()
    assert len(history.newer) == len(history.older) == 0
    await history.close()


async def test_a_tenants_outputs_are_in_its_own_history() -> None:
    histories = TokenHistories(1000)
    histories.add("ours", SENTENCE)
    await histories.settle()
    assert lookup_of(LookupKind.SUFFIX, SENTENCE[:3], histories.of("ours")).find(8) == SENTENCE[3:]
    assert lookup_of(LookupKind.SUFFIX, SENTENCE[:3], histories.of("theirs")).find(8) == []


async def test_a_request_finds_what_its_tenant_adds_after_the_request_began() -> None:
    histories = TokenHistories(1000)
    lookup = lookup_of(LookupKind.SUFFIX, [1, 2], histories.of("ours"))
    histories.add("ours", SENTENCE)
    await histories.settle()
    lookup.read(SENTENCE[:3])
    assert lookup.find(8) == SENTENCE[3:]


async def test_the_histories_of_all_tenants_together_are_bounded_and_the_largest_gives_way() -> None:
    histories = TokenHistories(200)
    histories.add("small", SENTENCE)
    for start in range(1000, 1500, 20):
        for tenant in ("large", "larger", "larger"):
            histories.add(tenant, list(range(start, start + 20)))
            await histories.settle()
            assert sum(history.num_tokens for history in histories._kept.values()) <= 200
    assert lookup_of(LookupKind.SUFFIX, SENTENCE[:3], histories.of("small")).find(8) == SENTENCE[3:]
    assert lookup_of(LookupKind.SUFFIX, [1480, 1481, 1482], histories.of("larger")).find(2) == [1483, 1484]


async def test_the_tenant_that_added_nothing_for_the_longest_time_is_dropped_first() -> None:
    histories = TokenHistories(1 << 20)
    for number in range(MAX_TENANTS + 1):
        histories.add(f"t{number}", SENTENCE)
        if number == 1:
            histories.add("t0", SENTENCE)
    await histories.settle()
    assert [histories.of(tenant).num_tokens > 0 for tenant in ("t0", "t1", "t2")] == [True, False, True]
