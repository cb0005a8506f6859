"""Pearson's chi-square test. Callers pool rare outcomes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def chi_square_p_value(observed: Sequence[float] | np.ndarray, expected: Sequence[float] | np.ndarray) -> float:
    """Return the probability of counts at least as far from `expected`; both have the same sum."""
    observed, expected = np.asarray(observed, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert np.isclose(observed.sum(), expected.sum(), rtol=1e-8)
    statistic = ((observed - expected) ** 2 / expected).sum()
    halves = torch.tensor([len(expected) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(halves[0], halves[1]))
