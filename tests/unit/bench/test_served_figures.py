"""What the suite `peers` makes of answers: rates, times, ratios, and whether the texts are the same."""

from __future__ import annotations

from functools import partial

import pytest

from bench.harness.rows import Origin, Row
from bench.suites.peers.figures import (
    Batch,
    Match,
    batch_rows,
    compare,
    comparison_rows,
    count_matches,
    server_rows,
    text_rows,
)
from bench.systems.process import Answer, AnswerClock, tokens_per_s

ORIGIN = Origin(hardware="2 cores, a processor", commit="abc123", date="2026-01-02T03:04:05Z")
ROW = partial(Row, suite="peers", row=None, case="a pair, 1 stream", origin=ORIGIN)


def answer(*chunk_s: float, tokens: int = 1) -> Answer:
    return Answer([5] * tokens * len(chunk_s), list(chunk_s), [tokens] * len(chunk_s))


def batch(seconds: float, cpu_s: float = 1.0) -> Batch:
    return Batch([[1, 2]], [answer(seconds / 2, seconds)], cpu_s)


def test_time_per_token_leaves_the_first_chunk_out_and_the_rate_counts_until_the_last_token() -> None:
    fast, slow = answer(0.5, 1.0, 1.5, tokens=2), answer(1.0, 3.0, tokens=3)
    assert fast.ttft_s == 0.5
    assert fast.tpot_s == pytest.approx(1.0 / 4)
    assert tokens_per_s([fast, slow]) == pytest.approx(12 / 3.0)


def test_a_clock_refuses_an_answer_of_another_length_and_ignores_empty_chunks() -> None:
    clock = AnswerClock(0.0)
    for token_ids in ([7], [], [8, 9]):
        clock.take(token_ids)
    assert clock.answer(3).chunk_tokens == [1, 2]
    with pytest.raises(RuntimeError, match="3 of 4 tokens"):
        clock.answer(4)


def test_specdec_is_compared_with_each_peer_of_the_same_decoding_and_with_itself() -> None:
    batches = {
        "specdec_drafted": [batch(1.0)] * 3, "vllm_drafted": [batch(2.0)] * 3, "specdec_alone": [batch(4.0)] * 3,
        "transformers_alone": [batch(2.0, cpu_s=3.0)] * 3,
    }  # fmt: skip
    assert {(row.system, row.ratio_to): row.value for row in comparison_rows(ROW, batches)} == {
        ("specdec_drafted", "vllm_drafted"): pytest.approx(2.0),
        ("specdec_alone", "transformers_alone"): pytest.approx(0.5),
        ("specdec_drafted", "specdec_alone"): pytest.approx(4.0),
    }
    rows = batch_rows(ROW, batches)
    figures = {row.metric: row.value for row in rows if row.system == "transformers_alone"}
    assert figures == {
        "tokens_per_s": 1.0, "ttft_ms_p50": 1000.0, "tpot_ms_p50": 1000.0, "tpot_ms_p99": 1000.0,
        "cpu_ms_per_token": 1500.0,
    }  # fmt: skip


def test_without_specdec_no_ratio_is_drawn() -> None:
    assert not comparison_rows(ROW, {"vllm_alone": [batch(1.0)]})


def test_start_and_memory_of_a_server_are_rows() -> None:
    rows = server_rows(ROW, "vllm_alone", 12.5, 3 << 20)
    assert [(row.metric, row.value) for row in rows] == [("start_s", 12.5), ("memory_mib", 3.0)]


@pytest.mark.parametrize(
    ("text", "gap", "match"),
    [([4, 5, 6], 9.0, Match.EQUAL), ([4, 7, 0], 2e-4, Match.TIED), ([4, 7, 0], -2e-4, Match.TIED),
     ([4, 7, 0], 0.1, Match.DIFFERENT), ([4, 5], 0.0, Match.DIFFERENT)],
)  # fmt: skip
def test_a_text_is_equal_tied_or_different(text: list[int], gap: float, match: Match) -> None:
    asked: list[object] = []

    def logit_gap(token_ids: list[int], first: int, second: int) -> float:
        asked.append((token_ids, first, second))
        return gap

    assert compare([1, 2], text, [4, 5, 6], logit_gap) is match
    assert asked == ([([1, 2, 4], 5, 7)] if text[1:] == [7, 0] else [])


def test_the_row_of_texts_falls_short_when_one_differs_and_they_must_be_the_same() -> None:
    matches = count_matches([[1]] * 3, [[2, 3], [2, 4], [2, 3]], [[2, 3]] * 3, lambda *asked: 1.0)
    assert matches == {Match.EQUAL: 2, Match.DIFFERENT: 1}
    for must_match in (True, False):
        *_, share = text_rows(ROW, "vllm_alone", "transformers_alone", matches, must_match)
        assert share.value == pytest.approx(2 / 3)
        assert share.falls_short is must_match
