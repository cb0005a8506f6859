"""The tolerance of audits, and filters that are nudged at their cut."""

from __future__ import annotations

import pytest

from coordinator.audit.target_pass import nudged_filters, tolerance_of
from specdec.contract.types import SamplingFilters
from specdec.core.limits import check_filters


def test_a_low_temperature_and_a_short_dtype_widen_the_tolerance() -> None:
    warm, cool = SamplingFilters(temperature=1.0), SamplingFilters(temperature=0.1)
    assert tolerance_of("float32", warm).gap == pytest.approx(1e-3)
    assert tolerance_of("float32", cool).gap == pytest.approx(1e-2)
    assert tolerance_of("bfloat16", warm).gap > 100 * tolerance_of("float32", warm).gap
    assert tolerance_of("float32", SamplingFilters(temperature=0.0)).gap == pytest.approx(1e-3)
    assert 0.0 < tolerance_of("bfloat16", cool).mass < 1.0


def test_filters_without_a_cut_have_nothing_to_nudge() -> None:
    filters = SamplingFilters(temperature=0.7, repetition_penalty=1.2)
    assert nudged_filters(filters, tolerance_of("float32", filters)) == ()


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_k": 50}, {"top_p": 1e-9}, {"top_p": 0.9999}, {"min_p": 0.999}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nudged_filters_are_allowed_and_lie_on_both_sides(cut: dict[str, float], dtype: str) -> None:
    filters = SamplingFilters(temperature=0.2, **cut)  # type: ignore[arg-type]
    narrower, wider = nudged_filters(filters, tolerance_of(dtype, filters))
    for nudged in (narrower, wider):
        check_filters(nudged, vocabulary_size=24)
    assert narrower.top_k <= filters.top_k <= wider.top_k
    assert narrower.top_p <= filters.top_p <= wider.top_p
    assert narrower.min_p >= filters.min_p >= wider.min_p
