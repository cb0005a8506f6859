"""The sparse wire in integers: cuts, draws, rows, and their torch versions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.contract.types import WEIGHT_TOTAL
from specdec.core.random import DrawKey, gumbel_noise
from specdec.core.reference import coupled_choice, cut_support, distribution_row
from specdec.core.sparse import default_s_max, draw_from_support, integer_weights
from specdec.engine.kernels.library import load_library
from specdec.engine.logits import kernel_choices
from specdec.engine.logits.rows import coupled_choices, coupled_scores, cut_supports, distribution_rows, logit_rows


def zipf(size: int, exponent: float, seed: int = 0) -> np.ndarray:
    weights = np.arange(1, size + 1) ** -exponent
    return np.random.default_rng(seed).permutation(weights / weights.sum())


def test_large_vocabularies_get_64_entries_and_small_ones_all_of_theirs() -> None:
    assert (default_s_max(2048), default_s_max(32_768), default_s_max(151_936)) == (2048, 32_768, 64)


def test_a_support_is_the_fewest_top_tokens_that_cover() -> None:
    support, lost = cut_support(np.array([0.1, 0.4, 0.0, 0.3, 0.2]), s_max=5, coverage=0.85)
    assert support.token_ids.tolist() == [1, 3, 4]
    assert support.weights.tolist() == [65535, round(65535 * 0.75), round(65535 * 0.5)]
    assert lost == pytest.approx(0.1)


def test_a_support_never_exceeds_s_max_and_ties_go_to_the_lower_id() -> None:
    support, lost = cut_support(np.full(10, 0.1), s_max=4, coverage=0.99)
    assert support.token_ids.tolist() == [0, 1, 2, 3]
    assert lost == pytest.approx(0.6)


def test_weights_that_round_to_zero_leave_the_support() -> None:
    support, lost = cut_support(np.array([1e-7, 1.0 - 1e-7]), s_max=2, coverage=1.0)
    assert support.token_ids.tolist() == [1]
    assert lost == pytest.approx(1e-7)


def test_a_one_hot_distribution_is_a_point_mass() -> None:
    support, lost = cut_support(np.array([0.0, 0.0, 1.0]), s_max=3)
    assert (support.token_ids.tolist(), lost) == ([2], 0.0)
    assert draw_from_support(support, DrawKey(1, 2, 3), 0) == 2
    assert draw_from_support(support, DrawKey(1, 2, 3), 0) == 2


def test_a_row_whose_support_holds_all_mass_has_no_tail_token() -> None:
    row = distribution_row(np.array([0.5, 0.0, 1.0 / 3, 1.0 / 6]), [0, 2, 3], 0.5)
    assert row.weights.tolist() == [WEIGHT_TOTAL // 2, 715_827_883, 357_913_941, 0]
    assert (row.tail_token_id, row.tail_probability) == (-1, 0.0)


def test_a_tail_mass_that_rounds_to_0_is_0() -> None:
    row = distribution_row(np.array([1.0 - 1e-12, 1e-12]), [0], 0.5)
    assert row.weights.tolist() == [WEIGHT_TOTAL, 0]
    assert row.tail_token_id == -1


def test_a_row_with_an_empty_support_is_a_draw_of_the_distribution() -> None:
    row = distribution_row(np.array([0.25, 0.0, 0.75]), [], 0.3)
    assert row.weights.tolist() == [WEIGHT_TOTAL]
    assert (row.tail_token_id, row.tail_probability) == (2, 0.75)


def test_a_support_without_target_mass_leaves_all_mass_to_the_tail() -> None:
    row = distribution_row(np.array([0.0, 0.0, 1.0]), [0, 1], 0.999)
    assert row.weights.tolist() == [0, 0, WEIGHT_TOTAL]
    assert (row.tail_token_id, row.tail_probability) == (2, 1.0)


def test_the_remainder_of_rounding_goes_to_the_largest_entry() -> None:
    masses = np.full(40_000, 0.25 / 40_000)
    weights = integer_weights(masses, 0.75)
    assert weights.sum(dtype=np.int64) == WEIGHT_TOTAL
    assert len(set(weights[:-1].tolist())) == 1


@pytest.mark.parametrize("size", [11, 512, 513, 4096])
def test_torch_supports_and_rows_equal_the_reference(size: int) -> None:
    distributions = np.stack([zipf(size, 0.3, 1), zipf(size, 1.1, 2), zipf(size, 3.0, 3), np.full(size, 1 / size)])
    distributions[1, distributions[1] < np.quantile(distributions[1], 0.3)] = 0.0
    distributions /= distributions.sum(axis=-1, keepdims=True)
    uniforms = [0.1, 0.5, 1e-12, 1.0 - 1e-12]
    for s_max, coverage in ((4, 0.99), (64, 0.99), (size, 0.99), (size, 1.0)):
        supports = cut_supports(torch.tensor(distributions), s_max, coverage)
        ids = [support.token_ids for support, _ in supports]
        rows = distribution_rows(torch.tensor(distributions), ids, uniforms)
        for distribution, uniform, (support, lost), row in zip(distributions, uniforms, supports, rows, strict=True):
            expected, expected_lost = cut_support(distribution, s_max, coverage)
            np.testing.assert_array_equal(support.token_ids, expected.token_ids)
            np.testing.assert_array_equal(support.weights, expected.weights)
            assert lost == pytest.approx(expected_lost, abs=1e-12)
            expected_row = distribution_row(distribution, expected.token_ids, uniform)
            np.testing.assert_array_equal(row.weights, expected_row.weights)
            assert row.tail_token_id == expected_row.tail_token_id
            assert row.tail_probability == expected_row.tail_probability


def test_torch_bonus_rows_equal_the_reference_among_other_rows() -> None:
    distributions = np.stack([zipf(700, 1.0, 1), zipf(700, 1.0, 2)])
    ids = [cut_support(distributions[0], 8)[0].token_ids, np.empty(0, dtype=np.uint32)]
    rows = distribution_rows(torch.tensor(distributions), ids, [0.7, 0.9])
    for distribution, support_ids, uniform, row in zip(distributions, ids, (0.7, 0.9), rows, strict=True):
        expected = distribution_row(distribution, support_ids, uniform)
        assert row.weights.tolist() == expected.weights.tolist()
        assert (row.tail_token_id, row.tail_probability) == (expected.tail_token_id, expected.tail_probability)


@pytest.fixture(params=["kernels", "torch"])
def by_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a test with the native kernels, and with PyTorch as in a process without kernels."""
    library = load_library(None) if request.param == "kernels" else None
    monkeypatch.setattr(kernel_choices, "loaded_library", lambda: library)
    return library is not None


@pytest.mark.usefixtures("by_kernels")
def test_torch_coupled_choices_equal_the_reference() -> None:
    distributions = np.stack([zipf(4001, exponent, seed) for seed, exponent in enumerate((0.0, 0.5, 1.0, 1.5, 8.0))])
    distributions[2, ::3] = 0.0
    distributions /= distributions.sum(axis=-1, keepdims=True)
    for base in range(20):
        seeds = [base, (1 << 64) - 1 - base, base << 32, 7, 7]
        turns, positions = [0, 1, base, 3, 3], [5, 5, 9, base, base + 1]
        choices, probabilities = coupled_choices(torch.tensor(distributions), seeds, turns, positions)
        for row, choice in enumerate(choices):
            assert choice == coupled_choice(distributions[row], seeds[row], turns[row], positions[row])
            assert probabilities[row] == distributions[row, choice]


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("num_tokens", [1, 2, 17, 40_000])
@pytest.mark.parametrize("share_kept", [1.0, 0.4, 0.01])
def test_torch_coupled_choices_equal_the_reference_at_any_width(num_tokens: int, share_kept: float) -> None:
    """Full distributions, thinned ones and the few tokens a top-p leaves; flat ones, where many tokens nearly win,
    too."""
    rng = np.random.default_rng(num_tokens)
    distributions = rng.dirichlet(np.ones(num_tokens), size=6) ** np.array([[0.0], [0.3], [1.0], [2.0], [4.0], [1.0]])
    distributions *= rng.random(distributions.shape) < share_kept
    distributions[:, num_tokens // 2] += 1e-6
    distributions /= distributions.sum(axis=-1, keepdims=True)
    seeds, turns, positions = [1, 2, 3, 1 << 63, 5, 5], [0, 1, 2, 3, 4, 4], [9, 8, 7, 6, 5, 4]
    choices, _ = coupled_choices(torch.tensor(distributions), seeds, turns, positions)
    assert choices == [coupled_choice(*of_row) for of_row in zip(distributions, seeds, turns, positions, strict=True)]
    scores = coupled_scores(torch.tensor(distributions), seeds, turns, positions)
    assert scores.argmax(dim=-1).tolist() == choices
    for row, distribution in enumerate(distributions):
        added = gumbel_noise(seeds[row], turns[row], positions[row], np.arange(num_tokens, dtype=np.uint32))
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(scores[row], np.log(distribution) + added, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("num_tokens", [3, 500, 262_147])
def test_a_coupled_choice_finds_a_token_that_leads_by_a_billionth(num_tokens: int) -> None:
    """Masses as small as the noise is large: every bit of the noise's numbers, and of its keys, decides."""
    rng = np.random.default_rng(num_tokens)
    for _ in range(1 if num_tokens > 1000 else 40):
        seed, turn, position = (int(rng.integers(1 << 63)), *(int(rng.integers(1 << 31)) for _ in range(2)))
        distribution = np.exp(-gumbel_noise(seed, turn, position, np.arange(num_tokens, dtype=np.uint32)))
        distribution /= distribution.sum()
        winner = int(rng.integers(num_tokens))
        distribution[winner] *= 1 + 1e-9
        assert coupled_choices(torch.tensor(distribution[None]), [seed], [turn], [position])[0] == [winner]


def test_kernels_leave_distributions_that_they_cannot_choose_from_to_torch() -> None:
    load_library(None)
    distribution = torch.full((2, 4), 0.25, dtype=torch.float64)
    assert kernel_choices.coupled_choices(distribution, [1, 2], [0, 0], [0, 0]) is not None
    assert kernel_choices.coupled_choices(distribution.float(), [1, 2], [0, 0], [0, 0]) is None
    assert kernel_choices.coupled_choices(distribution, [1], [0], [0]) is None
    assert kernel_choices.coupled_choices(torch.zeros_like(distribution), [1, 2], [0, 0], [0, 0]) is None


def test_logit_rows_are_the_raw_logits() -> None:
    logits = np.array([[1.0, 3.0, 3.0, -np.inf], [0.0, -1.0, 2.0, -np.inf]], dtype=np.float32)
    supports = [np.array([0, 2], dtype=np.uint32), np.empty(0, dtype=np.uint32)]
    first, second = logit_rows(torch.tensor(logits), supports, [-1, 2], 2)
    assert first.support_logits.tolist() == [1.0, 3.0]
    assert second.support_logits.tolist() == []
    assert (first.tail_logit, second.tail_logit) == (0.0, 2.0)
    assert first.logsumexp == pytest.approx(np.log(np.exp([1.0, 3.0, 3.0]).sum()))
    assert first.top_token_ids.tolist() == [1, 2]
    assert second.top_logits.tolist() == [2.0, 0.0]
    assert logit_rows(torch.tensor(logits), supports, [-1, 2], 0)[0].top_token_ids.tolist() == []
