"""Interleaved pairs and the ratio they give: the machine's drift affects both sides of a pair equally.

Called by the suites.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from bench.harness.report import progress
from bench.harness.rows import Row

MIN_PAIRS = 9
"""Fewest pairs of a kept figure; `--quick` takes fewer and says so."""

NUM_RESAMPLES = 10_000

Case = TypeVar("Case")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ratio:
    """A median ratio or difference of pairs, and the 95 % interval of that median."""

    median: float
    low: float
    high: float
    num_pairs: int

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of its row."""
        return {"value": self.median, "low": self.low, "high": self.high, "num_pairs": self.num_pairs}


def median_ratio(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> Ratio:
    """The median of the pairs' ratios with its 95 % interval.

    Args:
        numerators: one positive measurement per pair.
        denominators: the other side of the same pairs.
        seed: fixes the resampling, so that equal measurements give equal intervals.

    Raises:
        ValueError: no pairs, unequal lengths, or a measurement that is not positive.

    Source: Efron, "Bootstrap methods: another look at the jackknife", 1979 (percentile interval).
    """
    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if len(above) != len(below) or len(above) == 0:
        raise ValueError(f"pairs need two sides of equal length above 0 (got {len(above)} and {len(below)})")
    if not (above > 0).all() or not (below > 0).all():
        raise ValueError("every measurement of a pair must be positive")
    return _median_of(above / below, seed)


def median_difference(minuends: Sequence[float], subtrahends: Sequence[float], seed: int = 0) -> Ratio:
    """Return the median of the pairs' differences with its 95 % interval, as `median_ratio` does for ratios.

    Raises:
        ValueError: no pairs, or unequal lengths.
    """
    if len(minuends) != len(subtrahends) or len(minuends) == 0:
        raise ValueError(f"pairs need two sides of equal length above 0 (got {len(minuends)} and {len(subtrahends)})")
    return _median_of(np.asarray(minuends, dtype=np.float64) - np.asarray(subtrahends, dtype=np.float64), seed)


def resampled(figure: Callable[[np.ndarray], np.ndarray], count: int) -> Ratio:
    """Return a figure over `count` cases with its 95 % interval, by resampling the cases.

    Args:
        figure: returns the figure over the cases with these indices, int [..., N] to float [...].
        count: number of cases.
    """
    chosen = np.random.default_rng(0).integers(count, size=(NUM_RESAMPLES, count))  # [R, N]
    low, high = np.quantile(figure(chosen), [0.025, 0.975])
    return Ratio(float(figure(np.arange(count))), float(low), float(high), count)


def _median_of(values: np.ndarray, seed: int) -> Ratio:
    resamples = np.random.default_rng(seed).choice(values, size=(NUM_RESAMPLES, len(values)))  # [R, N]
    low, high = np.quantile(np.median(resamples, axis=1), [0.025, 0.975])
    return Ratio(float(np.median(values)), float(low), float(high), len(values))


def interleave(
    cases: Sequence[Case], systems: dict[str, Callable[[Case], Result]], after_each: Callable[[], None] = lambda: None
) -> dict[str, list[Result]]:
    """Run every case on every system, forwards for even cases and backwards for odd ones.

    Args:
        cases: inputs of each system, one at a time.
        systems: name to measurement; called one after the other, never at once.
        after_each: called after every measurement (progress).

    Returns:
        Per system, the results in the order of `cases`: equal indices are a pair.
    """
    results: dict[str, list[Result]] = {name: [] for name in systems}
    for index, case in enumerate(cases):
        order = list(systems) if index % 2 == 0 else list(systems)[::-1]
        for name in order:
            results[name].append(systems[name](case))
            after_each()
    return results


def take_turns(
    label: str, systems: dict[str, Callable[[Case], Result]], cases: Sequence[Case], warmup: Sequence[Case] = ()
) -> dict[str, list[Result]]:
    """Return the results of `interleave` under a progress bar, after cases that only warm up."""
    with progress(label, (len(warmup) + len(cases)) * len(systems)) as advance:
        interleave(warmup, systems, advance)
        return interleave(cases, systems, advance)


def ratio_row(
    row: Callable[..., Row], rates: Mapping[str, Sequence[float]], system: str, other: str, /, **fields: Any
) -> Row:
    """Return a system's tokens a second over another one's.

    Args:
        row: makes a row of the suite and case.
        rates: by system, in the order of the pairs.
        system: system of the row.
        other: system it is compared with.
        fields: further fields of the row, or other ones.
    """
    ratio = median_ratio(rates[system], rates[other])
    named = {"system": system, "ratio_to": other, "metric": "tokens_per_s_ratio", "unit": "x"}
    return row(**named | ratio.fields | fields)


def rate_rows(row: Callable[..., Row], rates: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return the median tokens a second of each system."""
    return [
        row(system=name, metric="tokens_per_s", value=float(np.median(measured)), unit="tokens/s")
        for name, measured in rates.items()
    ]


def best_row(row: Callable[..., Row], rates: Mapping[str, Sequence[float]], auto: str, /, **fields: Any) -> Row:
    """Return the tokens a second of the system `auto` over the best of the others, as `ratio_row` does."""
    best = max((name for name in rates if name != auto), key=lambda name: float(np.median(rates[name])))
    return ratio_row(row, rates, auto, best, ratio_to=f"best fixed ({best})", **fields)


def median_s(act: Callable[[], object], num_runs: int) -> float:
    """Return the median seconds of a few runs, one after the other."""
    taken_s = []
    for _ in range(num_runs):
        began_s = time.perf_counter()
        act()
        taken_s.append(time.perf_counter() - began_s)
    return float(np.median(taken_s))
