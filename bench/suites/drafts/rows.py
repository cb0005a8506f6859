"""Rows of suite `drafts` that compare systems by tokens a second. Called by `suite` and `heads`."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from bench.harness.pairs import rate_rows, ratio_row
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
    rows = [
        ratio_row(row, rates, system, other, row=number, required=required)
        for number, system, other, required in comparisons
    ]
    for name in drafting:
        rows.append(row(system=name, metric="alpha", value=acceptance(runs[name]), unit=""))
        rows.append(row(system=name, metric="tau", value=emitted_per_round(runs[name]), unit="tokens/round"))
    return rows + rate_rows(row, rates)


def same_text_row(runs: Runs, row: Callable[..., Row], system: str, other: str) -> Row:
    """Return the share of prompts for which two systems generated the same text."""
    same = [one.token_ids == another.token_ids for one, another in zip(runs[system], runs[other], strict=True)]
    return row(system=system, metric=f"texts_equal_to_{other}", value=float(np.mean(same)), unit="")
