"""What prefill is predicted to cost: learned, never guessed, and too much rather than too little."""

from __future__ import annotations

import pytest

from specdec.engine.schedule.step_times import StepLoad, StepTimes

UNKNOWN = float("inf")


def _step_s(load: StepLoad) -> float:
    """A device of 20 ms a step, 0.2 ms a token, 10 ns a pair."""
    num_tokens = load.num_tokens + load.num_prefill_tokens
    return (20e-3 if num_tokens else 0.0) + 0.2e-3 * num_tokens + 1e-8 * load.num_prefill_pairs


def _run(times: StepTimes, *loads: StepLoad) -> None:
    for load in loads:
        times.observe(load, _step_s(load))


def test_nothing_is_known_before_a_chunk_was_measured_and_the_first_is_cold() -> None:
    times, load = StepTimes(), StepLoad().with_prefill(16, 0)
    assert times.prefill_s(load) == UNKNOWN
    times.observe(load, 9.0)
    assert times.prefill_s(load) == UNKNOWN
    _run(times, load)
    assert times.prefill_s(load) == pytest.approx(_step_s(load))


def test_twice_the_largest_chunk_is_as_far_as_a_prediction_goes() -> None:
    times = StepTimes()
    _run(times, *[StepLoad().with_prefill(64, 0)] * 3)
    assert times.prefill_s(StepLoad().with_prefill(128, 0)) < UNKNOWN
    assert times.prefill_s(StepLoad().with_prefill(129, 0)) == UNKNOWN


def test_beside_verifications_prefill_costs_what_it_adds_and_alone_the_whole_step() -> None:
    times, others = StepTimes(), StepLoad(40, 2_000)
    for num_tokens in (16, 32, 64, 48, 16, 64):
        _run(times, others, others.with_prefill(num_tokens, 0), StepLoad().with_prefill(num_tokens, 0))
    added_s = 0.2e-3 * 64 + 1e-8 * 32 * 64
    assert times.prefill_s(others.with_prefill(64, 0)) == pytest.approx(added_s, rel=0.02)
    assert times.prefill_s(StepLoad().with_prefill(64, 0)) == pytest.approx(20e-3 + added_s, rel=0.02)


def test_a_replay_costs_its_steps_its_tokens_and_what_they_attend_to() -> None:
    times = StepTimes()
    assert times.replay_s(1_000, 0, 512) == 0.0
    for kv_len in (0, 5_000, 20_000):
        _run(times, *(StepLoad().with_prefill(num_tokens, kv_len) for num_tokens in (64, 512, 256, 128) * 4))
    steps = [StepLoad().with_prefill(num_tokens, start) for start, num_tokens in ((8, 512), (520, 512), (1_032, 476))]
    assert times.replay_s(1_500, 8, 512) == pytest.approx(sum(map(_step_s, steps)), rel=0.05)


def test_chunks_of_one_size_count_as_all_per_token() -> None:
    times, load = StepTimes(), StepLoad().with_prefill(16, 0)
    _run(times, *[load] * 20)
    assert times.prefill_s(StepLoad().with_prefill(32, 0)) >= 1.9 * times.prefill_s(load)


def test_hours_without_a_prompt_make_nothing_forgotten() -> None:
    times, others = StepTimes(), StepLoad(40, 2_000)
    for num_tokens in (16, 16, 32, 64):
        _run(times, others, others.with_prefill(num_tokens, 0))
    before_s = times.prefill_s(others.with_prefill(64, 0))
    _run(times, *[others] * 10_000)
    assert times.prefill_s(others.with_prefill(64, 0)) == before_s


def test_a_prompt_costs_more_further_on() -> None:
    times = StepTimes()
    _run(times, *[StepLoad().with_prefill(16 + 16 * (step % 3), 97 * step % 4_000) for step in range(100)])
    early_s, late_s = (times.prefill_s(StepLoad().with_prefill(48, kv_len)) for kv_len in (0, 4_000))
    assert late_s - early_s == pytest.approx(1e-8 * 48 * 4_000, rel=0.05)
