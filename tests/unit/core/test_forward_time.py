"""Fitted times follow observations, forget old ones, and never fall with more tokens."""

from __future__ import annotations

import pytest

from specdec.core.forward_time import ForwardTime, RunningMean


def test_fixed_per_token_and_per_context_costs_are_recovered() -> None:
    time = ForwardTime(is_fixed=True)
    for step in range(2000):
        tokens, context = step % 7, 500 * (step % 11)
        time.observe(tokens, context, 0.3 + 0.02 * tokens + 1e-5 * context)
    assert time.predict(10, 2000) == pytest.approx(0.3 + 0.2 + 0.02, rel=0.02)
    assert time.per_token_s == pytest.approx(0.02, rel=0.05)


def test_with_equal_tokens_time_is_fixed_or_proportional_as_configured() -> None:
    fixed, proportional = ForwardTime(is_fixed=True), ForwardTime(is_fixed=False)
    for time in (fixed, proportional):
        time.observe(2, 100, 0.1)
    assert fixed.predict(4, 100) == pytest.approx(0.1)
    assert proportional.predict(4, 100) == pytest.approx(0.2)


def test_old_times_fade() -> None:
    time = ForwardTime(is_fixed=True)
    for seconds in [9.0] * 100 + [0.1] * 300:
        time.observe(5, 100, seconds)
    assert time.predict(5, 100) == pytest.approx(0.1, abs=0.01)


def test_after_a_long_pause_one_observation_outweighs_the_past() -> None:
    time = ForwardTime(is_fixed=True)
    time.observe(1, 100, 9.0)
    for _ in range(4):
        time.observe(1, 100, 0.1, elapsed=50)
    assert time.predict(1, 100) < 0.2


def test_no_prediction_falls_with_more_tokens_or_below_zero() -> None:
    time = ForwardTime(is_fixed=True)
    for tokens, seconds in [(1, 0.9), (9, 0.1), (2, 0.8), (8, 0.01)]:
        time.observe(tokens, 100, seconds)
    predicted = [time.predict(tokens, 0) for tokens in range(20)]
    assert predicted == sorted(predicted)
    assert predicted[0] >= 0.0


def test_a_running_mean_begins_with_the_first_value() -> None:
    mean = RunningMean()
    assert mean.value == 0.0
    mean.observe(3.0)
    assert mean.value == 3.0
    mean.observe(5.0)
    assert mean.value == pytest.approx(4.0, abs=0.05)
