"""Decisions of one round: rejection, block and choices on small cases calculated by hand."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.contract.errors import Internal
from specdec.contract.types import WEIGHT_TOTAL, DistributionRow, Support, TokenSource
from specdec.core import block, rejection
from specdec.core.block import acceptance_levels, verify_block
from specdec.core.coupling import verify_choices
from specdec.core.random import DrawKey
from specdec.core.reference import distribution_row
from specdec.core.rejection import acceptance_bound, entry_of, verify_rejection
from tests.support.expectation import (
    acceptance_probability,
    coupled_acceptance_probability,
    expected_tokens_per_round,
)

KEY = DrawKey(seed=1, turn=0, committed_len=10)


def support(**weights: int) -> Support:
    ids = [int(name[1:]) for name in weights]
    return Support(np.array(ids, dtype=np.uint32), np.array(list(weights.values()), dtype=np.uint16))


def row(*weights: float, z: int = -1, p_z: float = 0.0) -> DistributionRow:
    return DistributionRow((np.array(weights) * WEIGHT_TOTAL).astype(np.uint32), z, p_z)


BONUS = row(1.0, z=9, p_z=0.5)


@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_a_round_without_draft_tokens_is_a_target_only_step(verify) -> None:
    decision = verify([], [], [BONUS], KEY)
    assert decision.token_ids == (9,)
    assert decision.sources == (TokenSource.TARGET,)
    assert (decision.num_accepted, decision.p, decision.q) == (0, (0.5,), (0.0,))


@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_draft_tokens_from_the_targets_own_distribution_are_always_accepted(verify) -> None:
    same = support(t1=1, t4=3)
    decision = verify([4, 1], [same, same], [row(0.25, 0.75, 0.0), row(0.25, 0.75, 0.0), BONUS], KEY)
    assert decision.token_ids == (4, 1, 9)
    assert decision.sources == (TokenSource.ACCEPTED, TokenSource.ACCEPTED, TokenSource.BONUS)
    assert (decision.p, decision.q) == ((0.75, 0.25, 0.5), (0.75, 0.25, 0.0))


@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_a_token_of_target_probability_0_is_replaced_from_the_residual(verify) -> None:
    rows = [row(0.0, 0.25, 0.75, z=7, p_z=0.5), BONUS]
    token_ids = set()
    for seed in range(60):
        decision = verify([1], [support(t1=1, t2=1)], rows, DrawKey(seed, 0, 0))
        assert decision.num_accepted == 0
        assert decision.sources == (TokenSource.CORRECTED,)
        token_ids.add(decision.token_ids[0])
        assert decision.p == (0.5,)
    assert token_ids == {7}  # p(2) = 0.25 is below q(2) = 0.5, so its residual is 0


@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_a_draft_token_outside_its_support_is_an_error_of_the_proposal(verify) -> None:
    with pytest.raises(Internal, match="draft token 3"):
        verify([3], [support(t1=1, t4=1)], [row(0.5, 0.5, 0.0), BONUS], KEY)


@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_a_point_mass_draft_is_accepted_with_its_target_probability(verify) -> None:
    rows = [row(0.25, 0.75, z=8, p_z=0.75), BONUS]
    decisions = [verify([2], [support(t2=5)], rows, DrawKey(seed, 0, 0)) for seed in range(2000)]
    num_accepted = sum(decision.num_accepted for decision in decisions)
    assert abs(num_accepted - 500) < 6 * np.sqrt(2000 * 0.25 * 0.75)  # deterministic; 6 sigma
    assert {decision.token_ids for decision in decisions} == {(2, 9), (8,)}


def test_the_acceptance_bound_is_the_rule_of_the_protocol_solved_for_u() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        weights = rng.integers(1, 65536, 4)
        draft = Support(np.arange(4, dtype=np.uint32), weights.astype(np.uint16))
        target = distribution_row(rng.dirichlet(np.ones(6)), np.arange(4), 0.5)
        entry = entry_of(2, draft)
        bound = acceptance_bound(entry, draft, target)
        for u in (0, bound - 1, bound, WEIGHT_TOTAL - 1):
            if 0 <= u < WEIGHT_TOTAL:
                rule = u * int(weights[2]) < int(target.weights[2]) * int(weights.sum())
                assert (u < bound) == rule


def test_the_residual_of_equal_distributions_is_that_distribution() -> None:
    weights = rejection.residual_weights(support(t1=1, t2=3), row(0.25, 0.75, 0.0))
    assert weights.tolist() == [WEIGHT_TOTAL // 4, 3 * WEIGHT_TOTAL // 4, 0]


def test_residual_weights_of_the_widest_distributions_fit_62_bits() -> None:
    size = 1 << 15
    wide = Support(np.arange(size, dtype=np.uint32), np.full(size, 65535, dtype=np.uint16))
    weights = rejection.residual_weights(
        wide, DistributionRow(np.array([0] * size + [WEIGHT_TOTAL], dtype=np.uint32), 40_000, 1.0)
    )
    assert weights[-1] == WEIGHT_TOTAL * size * 65535
    assert 0 < int(weights.sum()) <= 1 << 62


def test_block_levels_are_those_of_the_paper_on_a_case_by_hand() -> None:
    drafts = [support(t0=2, t1=1), support(t0=2, t1=1)]  # Q = 2/3, 1/3
    rows = [row(0.5, 0.5, 0.0), row(0.5, 0.5, 0.0), BONUS]
    shares, levels = acceptance_levels([0, 1], drafts, rows)
    assert shares == pytest.approx([1.0, 0.75, 1.0])
    excess = 0.75 * 0.5 - 1 / 3
    assert levels == pytest.approx([excess / (excess + 0.25), 1.0])


def test_block_accepts_a_prefix_without_excess_and_with_a_share_of_1() -> None:
    same = support(t1=1, t4=3)
    _, levels = acceptance_levels([1, 1], [same, same], [row(0.25, 0.75, 0.0)] * 2)
    assert levels == [1.0, 1.0]
    assert block.block_residual_weights(1.0, same, row(0.25, 0.75, 0.0)).tolist() == [0.0, 0.0, 0.0]


def test_choices_are_accepted_while_equal_and_the_last_token_is_the_targets() -> None:
    decision = verify_choices([5, 6, 7], [5, 9, 7, 1], [0.5, 0.25, 0.1, 0.2])
    assert decision.token_ids == (5, 9)
    assert decision.sources == (TokenSource.ACCEPTED, TokenSource.CORRECTED)
    assert decision.num_accepted == 1
    assert (decision.p, decision.q) == ((0.5, 0.25), (0.0, 0.0))
    assert verify_choices([5], [5, 2], [1.0, 1.0]).sources == (TokenSource.ACCEPTED, TokenSource.BONUS)
    assert verify_choices([], [2], [1.0]).sources == (TokenSource.TARGET,)


def test_expected_tokens_per_round_sum_the_survival_of_positions() -> None:
    assert expected_tokens_per_round([]) == 1.0
    assert expected_tokens_per_round([0.8] * 4) == pytest.approx((1 - 0.8**5) / 0.2)
    assert expected_tokens_per_round([1.0, 0.0, 1.0]) == 2.0


def test_acceptance_probabilities_of_rejection_and_coupling() -> None:
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.25, 0.5])
    assert acceptance_probability(p, q) == pytest.approx(0.5)
    assert acceptance_probability(p, p) == pytest.approx(1.0)
    assert coupled_acceptance_probability(p, p) == pytest.approx(1.0)
    assert coupled_acceptance_probability(p, q) == pytest.approx(2 / (1 + 1 + 2))


@pytest.mark.parametrize("token_id", [0, 3, 9], ids=["before", "between", "after"])
def test_an_entry_is_found_only_for_a_token_of_the_support(token_id: int) -> None:
    assert [entry_of(inside, support(t1=1, t4=1)) for inside in (1, 4)] == [0, 1]
    with pytest.raises(Internal, match=f"draft token {token_id} is not in its own support"):
        entry_of(token_id, support(t1=1, t4=1))


def test_residual_weights_are_exact_beyond_the_precision_of_a_double() -> None:
    size = 1 << 15
    draft_weights = np.full(size, 65535, dtype=np.uint16)
    draft_weights[0] -= 1
    wide = Support(np.arange(size, dtype=np.uint32), draft_weights)
    target = np.array([1] + [0] * (size - 1) + [WEIGHT_TOTAL - 1], dtype=np.uint32)
    weights = rejection.residual_weights(wide, DistributionRow(target, 40_000, 1.0))
    assert weights.tolist()[-1] == (WEIGHT_TOTAL - 1) * (size * 65535 - 1)
    same = rejection.residual_weights(support(t1=1, t2=3), row(0.25, 0.75, 0.0))
    assert weights.dtype == same.dtype == np.int64


def test_a_draw_at_a_level_itself_rejects() -> None:
    """Draws are in [0, 1) or (0, 1), so a level of 0 never accepts and a level of 1 always does."""

    class Half(DrawKey):
        def uniform(self, index: int, stream: object) -> float:
            return 0.5

    rows = [row(0.25, 0.75, 0.0), BONUS]  # p / q of token 1 is 0.25 / 0.5
    assert acceptance_levels([1], [support(t1=1, t2=1)], rows) == ([1.0, 0.5], [0.5])
    assert verify_block([1], [support(t1=1, t2=1)], rows, Half(1, 0, 0)).num_accepted == 0


def test_a_round_without_draft_tokens_has_no_levels() -> None:
    assert acceptance_levels([], [], [BONUS]) == ([1.0], [])


def test_every_choice_that_agrees_is_accepted() -> None:
    decisions = [verify_choices([5, 6, 7], [5, 6, 7, 1][:same] + [9] * (4 - same), [0.5] * 4) for same in range(4)]
    assert [decision.num_accepted for decision in decisions] == [0, 1, 2, 3]
    assert [decision.token_ids for decision in decisions] == [(9,), (5, 9), (5, 6, 9), (5, 6, 7, 9)]
