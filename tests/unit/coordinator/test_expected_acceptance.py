"""The expected acceptance of a round equals what the decision rules do, computed from the rules' own formulas."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from coordinator.audit.expected_acceptance import acceptance_probabilities, expected_acceptance
from specdec.contract.types import WEIGHT_TOTAL, DistributionRow, Mode, Support
from specdec.core.block import acceptance_levels
from specdec.core.rejection import acceptance_bound, entry_of
from specdec.core.sparse import integer_weights

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


def tree_of(rng: np.random.Generator, num_draft_tokens: int) -> dict[tuple[int, ...], tuple[Support, DistributionRow]]:
    """Return a support and a row after each prefix of up to `num_draft_tokens` - 1 tokens."""
    prefixes = [prefix for size in range(num_draft_tokens) for prefix in product(range(3), repeat=size)]
    supports = [Support(np.arange(3, dtype=np.uint32), rng.integers(1, 9, 3).astype(np.uint16)) for _ in prefixes]
    masses = [rng.dirichlet(np.full(3, 0.7)) * (0.9 if rng.random() < 0.5 else 1.0) for _ in prefixes]
    rows = [DistributionRow(integer_weights(each, 1.0 - float(each.sum())), 5, 0.0) for each in masses]
    return dict(zip(prefixes, zip(supports, rows, strict=True), strict=True))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.BLOCK])
def test_mean_and_variance_are_those_of_every_draft_that_q_may_draw(mode: Mode, seed: int) -> None:
    num_draft_tokens = 1 + seed % 4
    tree = tree_of(np.random.default_rng(seed), num_draft_tokens)
    total = difference = squares = variances = 0.0
    for drafted in product(range(3), repeat=num_draft_tokens):
        path = [tree[drafted[:index]] for index in range(num_draft_tokens)]
        supports, rows = [support for support, _ in path], [row for _, row in path]
        drawn = np.prod([s.weights[x] / s.weights.sum() for s, x in zip(supports, drafted, strict=True)])
        for count, chance in enumerate(acceptance_probabilities(mode, drafted, supports, rows)):
            mean, variance = expected_acceptance(mode, count, drafted, supports, rows)
            total += drawn * chance
            difference += drawn * chance * (count - mean)
            squares += drawn * chance * (count - mean) ** 2
            variances += drawn * chance * variance
    assert total == pytest.approx(1.0)
    assert difference == pytest.approx(0.0, abs=1e-8)
    assert squares == pytest.approx(variances, abs=1e-8)


@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.BLOCK])
def test_a_draft_that_does_not_draw_from_q_is_not_accepted_as_expected(mode: Mode) -> None:
    """It always names the first token, and reports a q that would name it half of the time."""
    support = Support(np.arange(2, dtype=np.uint32), np.array([1, 1], np.uint16))
    row = DistributionRow(integer_weights(np.array([0.5, 0.5]), 0.0), -1, 0.0)
    skewed = DistributionRow(integer_weights(np.array([0.9, 0.1]), 0.0), -1, 0.0)
    assert expected_acceptance(mode, 1, [0], [support], [row]) == pytest.approx((1.0, 0.0), abs=1e-6)
    mean, variance = expected_acceptance(mode, 1, [0], [support], [skewed])
    assert acceptance_probabilities(mode, [0], [support], [skewed])[1] == 1.0
    assert mean == pytest.approx(0.6, abs=1e-6)
    assert variance > 0.1
