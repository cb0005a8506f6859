"""Gamma follows the numbers: what pays is asked for, what does not is not, and nothing is held against a session."""

from __future__ import annotations

from coordinator.gamma import FIRST_GAMMA, PROBE_EVERY, GammaChooser, LinearTime, PoolRecord, RoundTimes


def watch(chooser: GammaChooser, *, alpha: float, draft_step_s: float, verify_s: float, rounds: int) -> list[int]:
    """Plays rounds in which every draft costs `draft_step_s` a token and about `alpha` of them are accepted."""
    chosen, credit = [], 0.0
    for _ in range(rounds):
        gamma = chooser.choose(100)
        accepted = 0
        while accepted < gamma:
            credit += alpha
            if credit < 1.0:
                break
            credit -= 1.0
            accepted += 1
        chooser.observe(
            RoundTimes(
                num_draft_tokens=gamma,
                num_accepted=accepted,
                draft_s=gamma * draft_step_s,
                verify_s=verify_s,
                num_prefilled=1,
            )
        )
        chosen.append(gamma)
    return chosen


def chooser(pool: PoolRecord | None = None, *, fixed: int | None = None) -> GammaChooser:
    return GammaChooser(pool or PoolRecord(), fixed=fixed, max_gamma=8)


def test_a_fixed_gamma_is_kept_and_only_the_limit_cuts_it() -> None:
    fixed = chooser(fixed=5)
    assert [fixed.choose(limit) for limit in (9, 5, 3, 0)] == [5, 5, 3, 0]


def test_the_first_round_asks_for_a_few_tokens() -> None:
    assert chooser().choose(100) == FIRST_GAMMA
    assert chooser().choose(2) == 2


def test_cheap_good_drafts_are_asked_for_as_long_as_allowed() -> None:
    assert watch(chooser(), alpha=0.98, draft_step_s=0.001, verify_s=0.05, rounds=80)[-1] == 8


def test_useless_drafts_lead_to_target_only_with_rare_probes() -> None:
    chosen = watch(chooser(), alpha=0.05, draft_step_s=0.02, verify_s=0.02, rounds=60 + 3 * PROBE_EVERY)
    late = chosen[60:]
    assert set(late) <= {0, 1}
    assert 2 <= late.count(1) <= 4


def test_target_only_is_left_when_drafts_become_good_again() -> None:
    pool = PoolRecord()
    watch(chooser(pool), alpha=0.05, draft_step_s=0.02, verify_s=0.02, rounds=80)
    later = watch(chooser(pool), alpha=1.0, draft_step_s=0.0005, verify_s=0.02, rounds=40 * PROBE_EVERY)
    assert later[-1] > 1


def test_a_new_session_begins_with_what_its_pool_has_shown() -> None:
    good, bad = PoolRecord(), PoolRecord()
    watch(chooser(good), alpha=0.95, draft_step_s=0.004, verify_s=0.02, rounds=80)
    watch(chooser(bad), alpha=0.2, draft_step_s=0.004, verify_s=0.02, rounds=80)
    assert chooser(good).choose(8) > chooser(bad).choose(8)


def test_the_same_observations_give_the_same_choices() -> None:
    runs = [watch(chooser(), alpha=0.7, draft_step_s=0.002, verify_s=0.02, rounds=50) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_prefill_does_not_count_as_a_slow_verification() -> None:
    pool = PoolRecord()
    chooser(pool).observe(RoundTimes(4, 4, draft_s=9.0, verify_s=9.0, num_prefilled=4000))
    assert not pool.verify_time.is_measured
    assert not pool.draft_time.is_measured


def test_linear_time_recovers_fixed_and_per_unit_costs() -> None:
    line = LinearTime(is_fixed=True)
    for step in range(100):
        line.observe(step % 5, 0.3 + 0.02 * (step % 5))
    assert abs(line.predict(10) - 0.5) < 1e-6


def test_with_equal_units_time_is_fixed_or_proportional_as_told() -> None:
    fixed, proportional = LinearTime(is_fixed=True), LinearTime(is_fixed=False)
    for line in (fixed, proportional):
        line.observe(2, 0.1)
    assert abs(fixed.predict(4) - 0.1) < 1e-9
    assert abs(proportional.predict(4) - 0.2) < 1e-9
