"""The statistics of interleaved pairs: medians, intervals and the order of measurements."""

import numpy as np
import pytest

from bench.harness.pairs import interleave, median_ratio


def test_the_median_of_equal_ratios_has_an_interval_of_no_width() -> None:
    ratio = median_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (ratio.median, ratio.low, ratio.high, ratio.num_pairs) == (2.0, 2.0, 2.0, 3)


def test_one_wild_pair_does_not_move_the_median() -> None:
    calm = median_ratio([1.1] * 9, [1.0] * 9)
    wild = median_ratio([1.1] * 8 + [50.0], [1.0] * 9)
    assert wild.median == calm.median


def test_drift_that_hits_both_sides_of_a_pair_cancels() -> None:
    drift = np.linspace(1.0, 5.0, 11)
    ratio = median_ratio(3.0 * drift, drift)
    assert ratio.median == pytest.approx(3.0)
    assert ratio.high - ratio.low == pytest.approx(0.0)


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    # Percentile intervals of a median are a little wide or narrow at 15 pairs: 95 % nominal, 400 trials of standard
    # error 1.1 %, seeded, so the test has one outcome; the bounds catch a broken interval (0 %, 50 % or 100 %).
    dice = np.random.default_rng(5)
    covered = 0
    for _ in range(400):
        ratio = median_ratio(np.exp(dice.normal(np.log(1.3), 0.1, 15)), np.ones(15))
        covered += ratio.low <= 1.3 <= ratio.high
    assert 0.90 <= covered / 400 <= 0.985


def test_the_same_measurements_give_the_same_interval() -> None:
    above = np.random.default_rng(1).uniform(1, 2, 9)
    assert median_ratio(above, np.ones(9)) == median_ratio(above, np.ones(9))


@pytest.mark.parametrize(("above", "below"), [([], []), ([1.0], [1.0, 2.0]), ([1.0], [0.0]), ([-1.0], [1.0])])
def test_sides_that_do_not_pair_up_are_refused(above: list[float], below: list[float]) -> None:
    with pytest.raises(ValueError, match=r"pair|positive"):
        median_ratio(above, below)


def test_systems_take_turns_and_swap_order_from_case_to_case() -> None:
    calls: list[tuple[str, int]] = []
    ticks: list[int] = []

    def system(name: str):
        def measure(case: int) -> str:
            calls.append((name, case))
            return f"{name}{case}"

        return measure

    results = interleave([0, 1, 2], {"A": system("A"), "B": system("B")}, lambda: ticks.append(1))
    assert calls == [("A", 0), ("B", 0), ("B", 1), ("A", 1), ("A", 2), ("B", 2)]
    assert results == {"A": ["A0", "A1", "A2"], "B": ["B0", "B1", "B2"]}
    assert len(ticks) == 6
