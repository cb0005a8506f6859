"""Expected tokens per round and acceptance probabilities in closed form, and a test of measured counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def chi_square_p_value(observed: Sequence[float] | np.ndarray, expected: Sequence[float] | np.ndarray) -> float:
    """Return the p-value of Pearson's chi-square test of counts; both have the same sum. Callers pool rare outcomes."""
    observed, expected = np.asarray(observed, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert np.isclose(observed.sum(), expected.sum(), rtol=1e-8)
    statistic = ((observed - expected) ** 2 / expected).sum()
    halves = torch.tensor([len(expected) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(halves[0], halves[1]))


def expected_tokens_per_round(acceptance_per_position: Sequence[float]) -> float:
    """Return E = 1 + sum over i of P(num_accepted >= i).

    Args:
        acceptance_per_position: for i = 1..gamma, the probability in [0, 1] that draft token i is accepted given that
            those before it were. An empty sequence is a target-only round, 1 token.

    Source: Leviathan et al. 2023, equation 1, with acceptance that may differ by position.
    """
    return 1.0 + float(np.cumprod(np.asarray(acceptance_per_position, dtype=np.float64)).sum())


def acceptance_probability(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Return the probability that token-wise rejection accepts a draw of q (float64 [V]) under p: sum of min(p, q).

    Source: Leviathan et al. 2023, theorem 3.5.
    """
    return float(np.minimum(p, q).sum())


def coupled_acceptance_probability(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Return the probability that Gumbel-coupled draws of p and q (float64 [V]) agree.

    sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x), over x with p_x and q_x above 0.

    Source: Daliri et al. 2024, section 4.
    """
    both = np.flatnonzero((p > 0) & (q > 0))
    return float(sum(1.0 / np.maximum(p / p[x], q / q[x]).sum() for x in both))
