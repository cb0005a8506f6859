"""The expected acceptance of a round equals what the decision rules do, computed from the rules' own formulas."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.audit.expected_acceptance import acceptance_probabilities
from specdec.core.block import acceptance_levels
from specdec.core.rejection import acceptance_bound, entry_of
from specdec.core.sparse import integer_weights
from specdec.types import WEIGHT_TOTAL, DistributionRow, Mode, Support

NUM_IDS = 6


def round_of(rng: np.random.Generator, num_draft_tokens: int) -> tuple[list[int], list[Support], list[DistributionRow]]:
    """Return a random draft with its supports and the target's rows, p = q and p = 0 among them."""
    supports = [
        Support(np.arange(NUM_IDS, dtype=np.uint32), rng.integers(1, 9, NUM_IDS).astype(np.uint16))
        for _ in range(num_draft_tokens)
    ]
    rows = []
    for index, support in enumerate(supports):
        masses = support.weights / support.weights.sum()
        if index % 3:
            masses = rng.dirichlet(np.ones(NUM_IDS)) * (rng.random(NUM_IDS) < 0.8)
        rows.append(DistributionRow(integer_weights(masses, 0.1 * (index % 2)), -1, 0.0))
    return rng.integers(0, NUM_IDS, num_draft_tokens).tolist(), supports, rows


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.BLOCK])
def test_probabilities_are_those_of_the_decision(mode: Mode, seed: int) -> None:
    drafted, supports, rows = round_of(np.random.default_rng(seed), 1 + seed % 5)
    if mode is Mode.BLOCK:
        levels = [1.0, *acceptance_levels(drafted, supports, rows)[1]]
        expected = [
            level * np.prod([1.0 - longer for longer in levels[count + 1 :]]) for count, level in enumerate(levels)
        ]
    else:
        accepts = [
            acceptance_bound(entry_of(token_id, support), support, row) / WEIGHT_TOTAL
            for token_id, support, row in zip(drafted, supports, rows, strict=True)
        ]
        expected = [
            np.prod(accepts[:count]) * (1.0 - accepts[count] if count < len(accepts) else 1.0)
            for count in range(len(accepts) + 1)
        ]
    probabilities = acceptance_probabilities(mode, drafted, supports, rows)
    assert probabilities == pytest.approx(expected, abs=1e-8)
    assert probabilities.sum() == pytest.approx(1.0)


def test_a_smaller_p_makes_a_rejection_possible_where_p_equals_q() -> None:
    support = Support(np.arange(2, dtype=np.uint32), np.array([1, 1], np.uint16))
    row = DistributionRow(np.array([WEIGHT_TOTAL // 2, WEIGHT_TOTAL // 2, 0], np.uint32), -1, 0.0)
    for mode in (Mode.REJECTION, Mode.BLOCK):
        assert acceptance_probabilities(mode, [0], [support], [row])[0] == 0.0
        assert acceptance_probabilities(mode, [0], [support], [row], 0.999)[0] == pytest.approx(0.001)
