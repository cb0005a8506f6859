"""What the suite `observability` makes of batches as rows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest

from bench.harness.rows import Origin, Row
from bench.suites.observability.calls import Observed
from bench.suites.observability.systems import (
    AUDITED,
    AUDITED_EVERY,
    PLAIN,
    SCRAPED,
    SYSTEMS,
    TRACED,
    CountedBatch,
    ObservedBatch,
    metrics_rows,
    system_rows,
)
from specdec.settings.coordinator import CoordinatorSettings

ORIGIN = Origin(hardware="2 cores, a processor", commit="abc123", date="2026-01-02T03:04:05Z")
ROW = partial(Row, suite="observability", row=None, origin=ORIGIN, case="a pair")
DEFAULT_SHARE = CoordinatorSettings.model_fields["audit_share"].default


def row_of(rows: list[Row], system: str, metric: str) -> Row:
    (found,) = (row for row in rows if (row.system, row.metric) == (system, metric))
    return found


def batches_of(rates: Mapping[str, list[float]]) -> dict[str, list[ObservedBatch]]:
    """Return batches of 40 rounds each; of those whose rounds are all to be audited, half were."""
    batches = {}
    for name in SYSTEMS:
        num_audited = 20.0 * (name == AUDITED_EVERY)
        batches[name] = [ObservedBatch(rate, 40, num_audited) for rate in rates.get(name, [100.0, 200.0])]
    return batches


def test_metrics_cost_the_time_of_their_calls_in_all_services() -> None:
    calls = {"coordinator": Observed(80, 0.003), "target_service": Observed(40, 0.001)}
    rows = metrics_rows(ROW, [CountedBatch(num_rounds=10, seconds=1.0, calls=calls)] * 3)
    share = row_of(rows, "metrics, in process", "share_of_round")
    assert share.value == pytest.approx(0.004)
    assert not share.falls_short
    assert row_of(rows, "coordinator, in process", "metrics_us_per_round").value == pytest.approx(300.0)
    assert row_of(rows, "target_service, in process", "calls_per_round").value == pytest.approx(4.0)
    assert row_of(rows, "round", "time_per_round_ms").value == pytest.approx(100.0)
    dear = metrics_rows(ROW, [CountedBatch(num_rounds=10, seconds=0.3, calls=calls)] * 3)
    assert row_of(dear, "metrics, in process", "share_of_round").falls_short


def test_systems_are_compared_with_the_plain_one_pair_by_pair() -> None:
    rows = system_rows(ROW, batches_of({AUDITED: [98.0, 196.0]}))
    ratio = row_of(rows, AUDITED, "tokens_per_s_ratio")
    assert (ratio.value, ratio.ratio_to, ratio.falls_short) == (pytest.approx(0.98), PLAIN, True)
    assert not row_of(rows, TRACED, "tokens_per_s_ratio").falls_short
    assert {row.system for row in rows if row.metric == "tokens_per_s"} == set(SYSTEMS)


def test_an_audit_of_some_rounds_and_frequent_scrapes_tell_what_the_defaults_cost() -> None:
    rows = system_rows(ROW, batches_of({AUDITED_EVERY: [80.0, 160.0], SCRAPED: [80.0, 160.0]}))
    assert row_of(rows, AUDITED_EVERY, "share_audited").value == pytest.approx(0.5)
    # A quarter more time for half of the rounds is half a round's time for each audit.
    assert row_of(rows, AUDITED, "cost_share").value == pytest.approx(0.5 * DEFAULT_SHARE)
    assert row_of(rows, "scraped every 15 s", "cost_share").value == pytest.approx(0.25 * 0.1 / 15)
