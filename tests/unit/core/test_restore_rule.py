"""The rule for fetching KV: n·b/W + L < n/F."""

from __future__ import annotations

import pytest

from specdec.core.restore_rule import RestoreRule

RUN_BYTES, RUN_TOKENS = 1_000_000, 256


def rule_of(bytes_per_s: float, latency_s: float) -> RestoreRule:
    rule = RestoreRule()
    rule.observe_latency(latency_s)
    rule.observe_transfer(RUN_BYTES, RUN_BYTES / bytes_per_s)
    return rule


def replay_s(num_runs: int, tokens_per_s: float) -> list[float]:
    return [count * RUN_TOKENS / tokens_per_s for count in range(1, num_runs + 1)]


@pytest.mark.parametrize("num_runs", [1, 6, 40])
@pytest.mark.parametrize("bytes_per_s", [1e7, 3e8, 1e10])
@pytest.mark.parametrize("latency_s", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("tokens_per_s", [1e2, 1e4, 1e6])
def test_all_runs_are_fetched_exactly_if_the_rule_says_so(
    num_runs: int, bytes_per_s: float, latency_s: float, tokens_per_s: float
) -> None:
    left_s = num_runs * RUN_BYTES / bytes_per_s + latency_s
    right_s = num_runs * RUN_TOKENS / tokens_per_s
    rule = rule_of(bytes_per_s, latency_s)
    assert rule.num_worth(replay_s(num_runs, tokens_per_s), RUN_BYTES) == (num_runs if left_s < right_s else 0)
    assert rule.restore_s(num_runs * RUN_BYTES) == pytest.approx(left_s)


def test_nothing_is_fetched_before_the_first_measurement() -> None:
    rule = RestoreRule()
    rule.observe_latency(1e-4)
    assert rule.num_worth(replay_s(6, 1.0), RUN_BYTES) == 0
    assert rule.bytes_per_s == 0.0


def test_nothing_is_fetched_if_prefill_was_not_measured() -> None:
    assert rule_of(1e9, 0.0).num_worth([0.0, 0.0], RUN_BYTES) == 0


def test_the_number_of_fetched_runs_saves_the_most_time() -> None:
    # Each run costs 0.1 s to fetch.
    assert rule_of(1e7, 0.05).num_worth([0.3, 0.6, 0.65], RUN_BYTES) == 2


def test_bytes_of_earlier_requests_count_as_waiting_time() -> None:
    rule = rule_of(1e7, 0.0)
    assert rule.num_worth(replay_s(3, 1e3), RUN_BYTES) == 3
    assert rule.num_worth(replay_s(3, 1e3), RUN_BYTES, queued_bytes=10 * RUN_BYTES) == 0


def test_copying_into_blocks_counts_as_transfer() -> None:
    rule = rule_of(1e7, 0.0)
    rule.observe_copy(RUN_BYTES, 0.4)
    assert rule.bytes_per_s == pytest.approx(RUN_BYTES / 0.5)


def test_a_store_that_became_slow_is_noticed_within_a_few_transfers() -> None:
    rule = rule_of(1e9, 0.0)
    for _ in range(20):
        rule.observe_transfer(RUN_BYTES, RUN_BYTES / 1e9)
    rule.observe_transfer(RUN_BYTES, RUN_BYTES / 1e6)
    assert rule.bytes_per_s == pytest.approx(1e9)  # a single delay is ignored
    for _ in range(2):
        rule.observe_transfer(RUN_BYTES, RUN_BYTES / 1e6)
    assert rule.bytes_per_s == pytest.approx(1e6)
