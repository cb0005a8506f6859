"""Rows of suite `drafts` that compare systems by tokens a second. Called by `suite` and `heads`."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from bench.harness.pairs import median_ratio
from bench.harness.rows import Row
from bench.systems.ours import SystemRun, acceptance, emitted_per_round
from bench.systems.transformers import PeerRun

Runs = Mapping[str, Sequence[SystemRun] | Sequence[PeerRun]]


def speed_rows(
    runs: Runs,
    row: Callable[..., Row],
    comparisons: Iterable[tuple[int | None, str, str, float | None]],
    drafting: Collection[str],
) -> list[Row]:
    """Ratios of tokens a second, then each system's own figures.

    Args:
        runs: of each system, in the order of the prompts.
        row: makes a row of the suite and case.
        comparisons: number of the agreed row, system, system it is compared with, ratio it must reach.
        drafting: systems whose acceptance is reported as well.
    """
    rates = {name: [len(run.token_ids) / run.e2el_s for run in done] for name, done in runs.items()}
    rows = []
    for number, system, other, required in comparisons:
        ratio = median_ratio(rates[system], rates[other])
        rows.append(
            row(
                row=number, system=system, metric="tokens_per_s_ratio", value=ratio.median, unit="x", ratio_to=other,
                low=ratio.low, high=ratio.high, num_pairs=ratio.num_pairs, required=required,
            )
        )  # fmt: skip
    for name, measured in rates.items():
        figures = {"tokens_per_s": (float(np.median(measured)), "tokens/s")}
        if name in drafting:
            figures |= {"alpha": (acceptance(runs[name]), ""), "tau": (emitted_per_round(runs[name]), "tokens/round")}
        rows += [
            row(row=None, system=name, metric=metric, value=value, unit=unit)
            for metric, (value, unit) in figures.items()
        ]
    return rows


def same_text_row(runs: Runs, row: Callable[..., Row], system: str, other: str) -> Row:
    """Return the share of prompts for which two systems generated the same text."""
    same = [one.token_ids == another.token_ids for one, another in zip(runs[system], runs[other], strict=True)]
    return row(row=None, system=system, metric=f"texts_equal_to_{other}", value=float(np.mean(same)), unit="")
