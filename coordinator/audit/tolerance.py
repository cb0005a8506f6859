"""Differences between two forward passes over the same tokens that rounding alone explains.

Passes of different batch shapes may differ in the last bits (docs/protocol.md section 4). A difference of two tokens'
scores within the tolerance is a tie. A token at the edge of top-k, top-p or min-p may be cut in one pass and kept in
the other; filters that are nudged to both sides show it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specdec.contract.types import SamplingFilters

#: Difference of two logits that rounding may explain, for float32 and for every other dtype of a target.
FLOAT32_LOGIT_GAP = 1e-3
OTHER_LOGIT_GAP = 0.25


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Tolerance of one request's distributions."""

    gap: float
    """Difference of two log probabilities."""

    @property
    def mass(self) -> float:
        """Total variation of two distributions whose log probabilities differ by at most half of `gap` each way."""
        return math.tanh(self.gap / 2.0)


def tolerance_of(dtype: str, filters: SamplingFilters) -> Tolerance:
    """Return the tolerance for a target of this dtype; a low temperature magnifies differences of logits."""
    logit_gap = FLOAT32_LOGIT_GAP if dtype == "float32" else OTHER_LOGIT_GAP
    return Tolerance(logit_gap / (filters.temperature or 1.0))


def nudged_filters(filters: SamplingFilters, tolerance: Tolerance) -> tuple[SamplingFilters, ...]:
    """Return the filters with a slightly narrower and a slightly wider cut; () where nothing is cut."""
    if not (filters.top_k or filters.top_p < 1.0 or filters.min_p > 0.0):
        return ()
    mass = tolerance.mass
    narrower = replace(
        filters,
        top_k=max(1, filters.top_k - 1) if filters.top_k else 0,
        top_p=max(filters.top_p * 0.5, filters.top_p - mass) if filters.top_p < 1.0 else 1.0,
        min_p=min(filters.min_p * (1.0 + mass), (1.0 + filters.min_p) / 2.0),
    )
    wider = replace(
        filters,
        top_k=filters.top_k + 1 if filters.top_k else 0,
        top_p=min(1.0, filters.top_p + mass),
        min_p=filters.min_p * (1.0 - mass),
    )
    return narrower, wider
