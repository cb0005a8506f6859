"""The deadline of a draft is a multiple of the pool's usual wait, plus the time of prefill."""

from __future__ import annotations

import pytest

from coordinator.round.draft_deadline import (
    DEADLINE_MULTIPLE,
    FIRST_PREFILL_S,
    FIRST_WAIT_S,
    LEAST_DEADLINE_S,
    PREFILL_MULTIPLE,
    DraftDeadline,
)
from coordinator.round.pool_stats import MAX_PREFILLED

GAMMA = 4


def warm(step_s: float, rounds: int = 100) -> DraftDeadline:
    clock = DraftDeadline()
    for _ in range(rounds):
        clock.observe(GAMMA, 2, GAMMA * step_s)
    return clock


def test_a_fast_draft_has_the_shortest_deadline_and_a_slow_one_a_multiple_of_its_time() -> None:
    assert warm(0.001).deadline_s(GAMMA, 2) == LEAST_DEADLINE_S
    assert warm(0.05).deadline_s(GAMMA, 2) == pytest.approx(DEADLINE_MULTIPLE * GAMMA * 0.05)


@pytest.mark.parametrize(("usual", "now"), [(1, 8), (8, 1)])
@pytest.mark.parametrize("trip_s", [0.0, 0.2])
def test_a_draft_of_another_number_of_tokens_still_meets_its_deadline(usual: int, now: int, trip_s: float) -> None:
    clock = DraftDeadline()
    for _ in range(100):
        clock.observe(usual, 2, trip_s + usual * 0.05)
    assert clock.deadline_s(now, 2) >= 1.5 * (trip_s + now * 0.05)


def test_the_time_of_one_token_on_a_busy_machine_is_not_multiplied_by_the_number_of_tokens() -> None:
    clock = DraftDeadline()
    for gamma in [1, 4] * 50:
        clock.observe(gamma, 2, 0.03 + gamma * 0.001)
    assert clock.deadline_s(8, 2) <= 2 * DEADLINE_MULTIPLE * 0.038


def test_an_unknown_draft_gets_a_deadline_far_below_the_draft_timeout() -> None:
    assert DraftDeadline().deadline_s(GAMMA, 20) == pytest.approx(DEADLINE_MULTIPLE * FIRST_WAIT_S)
    prompt_s = PREFILL_MULTIPLE * 1000 * FIRST_PREFILL_S
    assert DraftDeadline().deadline_s(GAMMA, 1000) == pytest.approx(DEADLINE_MULTIPLE * FIRST_WAIT_S + prompt_s)


@pytest.mark.parametrize("num_prefilled", [2, 4000])
def test_the_pools_first_answer_does_not_count(num_prefilled: int) -> None:
    clock = DraftDeadline()
    clock.observe(GAMMA, num_prefilled, 1000.0)
    for _ in range(3):
        clock.observe(GAMMA, 2, 0.2)
    assert clock.deadline_s(GAMMA, 2) == pytest.approx(DEADLINE_MULTIPLE * 0.2)
    assert clock.deadline_s(GAMMA, 4000) < 100.0


def test_a_prefill_of_a_few_tokens_is_part_of_the_usual_wait() -> None:
    clock = DraftDeadline()
    for _ in range(100):
        clock.observe(GAMMA, MAX_PREFILLED, 0.2)
    for num_prefilled in (0, MAX_PREFILLED):
        assert clock.deadline_s(GAMMA, num_prefilled) == pytest.approx(DEADLINE_MULTIPLE * 0.2)


@pytest.mark.parametrize("prefill_s", [0.0, 2e-4])
def test_the_time_of_prefill_is_learned_apart_from_drafting_and_old_times_fade(prefill_s: float) -> None:
    clock = warm(0.05)
    for now_s in (10 * prefill_s, prefill_s):
        for _ in range(1500):
            clock.observe(GAMMA, 1000, GAMMA * 0.05 + 1000 * now_s)
    prompt_s = PREFILL_MULTIPLE * 4000 * prefill_s
    assert clock.deadline_s(GAMMA, 4000) == pytest.approx(DEADLINE_MULTIPLE * GAMMA * 0.05 + prompt_s, rel=0.02)


@pytest.mark.parametrize("prefill_s", [1e-5, 1e-3, 2e-2])
def test_a_long_prompt_gets_a_longer_deadline(prefill_s: float) -> None:
    clock = warm(0.002)
    for num_prefilled in (300, 2000, 900):
        clock.observe(GAMMA, num_prefilled, GAMMA * 0.002 + num_prefilled * prefill_s)
    assert clock.deadline_s(GAMMA, 4000) >= 2 * 4000 * prefill_s
    assert clock.deadline_s(GAMMA, 2) == LEAST_DEADLINE_S


def test_a_thousand_rounds_without_prefill_do_not_forget_its_time() -> None:
    clock = warm(0.002)
    clock.observe(GAMMA, 4000, 8.0)
    before = clock.deadline_s(GAMMA, 4000)
    for _ in range(1000):
        clock.observe(GAMMA, 2, GAMMA * 0.002)
    assert clock.deadline_s(GAMMA, 4000) == pytest.approx(before, rel=0.1)


def test_a_draft_that_is_mostly_made_ahead_still_gets_enough_time_after_a_branch_miss() -> None:
    clock = DraftDeadline()
    for index in range(300):
        clock.observe(GAMMA, 2, 0.4 if index % 20 == 0 else 0.001)
    assert clock.deadline_s(GAMMA, 2) > 0.4


def test_a_deadline_falls_again_after_a_slow_period() -> None:
    clock = warm(0.1)
    for _ in range(300):
        clock.observe(GAMMA, 2, GAMMA * 0.001)
    assert clock.deadline_s(GAMMA, 2) == LEAST_DEADLINE_S
