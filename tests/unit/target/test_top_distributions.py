"""Laws from the likeliest K tokens alone, compared with the whole distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specdec.contract.types import SamplingFilters
from specdec.core.reference import filtered_distribution
from target_service.backends.contract import Distribution, TopTokens
from target_service.backends.filtered_distributions import distribution_of, num_wanted

NUM_TOKENS = 60

filters = st.builds(
    SamplingFilters,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 8, 20]),
    top_p=st.sampled_from([1.0, 0.95, 0.6]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
)


def random_logits(seed: int, spread: float) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(scale=spread, size=NUM_TOKENS)


def top_of(logits: NDArray[np.float64], num_top: int) -> TopTokens:
    """Return what an engine states: the top tokens with the logarithms of their probabilities at temperature 1."""
    logprobs = logits - np.log(np.exp(logits).sum())
    ids = np.argsort(-logprobs, kind="stable")[:num_top]
    return TopTokens(ids.astype(np.uint32), logprobs[ids], 0.0)


def dense(law: Distribution) -> NDArray[np.float64]:
    distribution = np.zeros(NUM_TOKENS)
    distribution[law.token_ids] = law.probabilities
    return distribution


@given(st.integers(0, 2**32), st.sampled_from([0.5, 2.0, 5.0]), st.integers(1, 30), filters)
def test_a_law_that_top_tokens_decide_is_the_filtered_distribution_of_all_tokens(
    seed: int, spread: float, num_top: int, sampling: SamplingFilters
) -> None:
    logits = random_logits(seed, spread)
    law = distribution_of(top_of(logits, num_top), NUM_TOKENS, sampling)
    if law is not None:
        expected = filtered_distribution(logits, sampling, [], 0)
        np.testing.assert_allclose(dense(law), expected, atol=1e-12)
        assert list(law.token_ids) == sorted(law.token_ids)


@given(st.integers(0, 2**32), filters, st.sets(st.integers(0, NUM_TOKENS - 1), max_size=3))
def test_masked_end_tokens_are_left_out_as_they_are_of_all_tokens(
    seed: int, sampling: SamplingFilters, masked: set[int]
) -> None:
    logits = random_logits(seed, 3.0)
    law = distribution_of(top_of(logits, 24), NUM_TOKENS, sampling, masked)
    if law is not None:
        left = logits.copy()
        left[list(masked)] = -np.inf
        np.testing.assert_allclose(dense(law), filtered_distribution(left, sampling, [], 0), atol=1e-12)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [1, 5, 20])
def test_top_k_within_the_known_tokens_decides_every_law(temperature: float, top_k: int) -> None:
    sampling = SamplingFilters(temperature=temperature, top_k=top_k, top_p=0.9, min_p=0.02)
    for seed in range(50):
        num_top = num_wanted(sampling, 0, 20)
        assert num_top == min(top_k + 1, 20)
        assert distribution_of(top_of(random_logits(seed, 1.0), num_top), NUM_TOKENS, sampling) is not None


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingFilters(),
        SamplingFilters(top_p=0.99),
        SamplingFilters(min_p=1e-4),
        SamplingFilters(top_k=30),
        SamplingFilters(temperature=2.0, top_p=0.95),
    ],
    ids=["no filter", "top-p", "min-p", "top-k above K", "temperature 2"],
)
def test_tokens_that_are_not_known_and_may_be_kept_leave_the_law_undecided(sampling: SamplingFilters) -> None:
    """The distribution is nearly flat, so each filter keeps more than the 10 known tokens."""
    assert distribution_of(top_of(random_logits(1, 0.2), 10), NUM_TOKENS, sampling) is None


def test_a_nucleus_that_ends_near_the_last_known_token_is_undecided_only_where_the_tail_could_move_its_end() -> None:
    """Below temperature 1 the tail's mass is known within bounds, and the bounds decide most nuclei."""
    sampling = SamplingFilters(temperature=0.7, top_p=0.9)
    laws = [distribution_of(top_of(random_logits(seed, 3.0), 20), NUM_TOKENS, sampling) for seed in range(200)]
    num_decided = sum(law is not None for law in laws)
    assert num_decided >= 150
    flat = [distribution_of(top_of(random_logits(seed, 0.5), 8), NUM_TOKENS, sampling) for seed in range(200)]
    assert not any(flat)


def test_all_tokens_decide_every_law() -> None:
    logits = random_logits(3, 1.0)
    law = distribution_of(top_of(logits, NUM_TOKENS), NUM_TOKENS, SamplingFilters(temperature=1.3))
    assert law is not None
    np.testing.assert_allclose(dense(law), filtered_distribution(logits, SamplingFilters(temperature=1.3), [], 0))


def test_of_equal_top_tokens_a_greedy_law_takes_the_lower_id() -> None:
    top = TopTokens(np.array([9, 4, 1], dtype=np.uint32), np.log([0.4, 0.4, 0.1]), 0.0)
    law = distribution_of(top, NUM_TOKENS, SamplingFilters(temperature=0.0))
    assert law is not None
    assert law.token_ids.tolist() == [4]


def test_ids_beyond_the_vocabulary_are_left_out() -> None:
    """A checkpoint may have more rows of logits than its tokenizer has tokens."""
    top = TopTokens(np.array([NUM_TOKENS + 3, 4, 1], dtype=np.uint32), np.log([0.5, 0.3, 0.1]), 0.0)
    law = distribution_of(top, NUM_TOKENS, SamplingFilters(temperature=1.0, top_k=2))
    assert law is not None
    np.testing.assert_allclose(dense(law)[[4, 1]], [0.75, 0.25])


@pytest.mark.parametrize(("temperature", "top_p"), [(2.0, 0.95), (2.5, 0.95), (3.0, 0.9), (1.0, 0.9), (0.7, 0.95)])
def test_rounding_of_logprobs_to_32_bits_decides_no_law_wrongly(temperature: float, top_p: float) -> None:
    """The mass of 150,000 unlikely tokens is lost in rounding, but above temperature 1 it is most of the weight."""
    logits = np.full(151_936, -18.0)
    logits[:20] = [20.0 - step for step in range(20)]
    sampling = SamplingFilters(temperature=temperature, top_p=top_p)
    logprobs = (logits - np.log(np.exp(logits).sum())).astype(np.float32)[:20].astype(np.float64)
    law = distribution_of(TopTokens(np.arange(20, dtype=np.uint32), logprobs, 0.0), len(logits), sampling)
    expected = filtered_distribution(logits, sampling, [], 0)
    if law is not None:
        np.testing.assert_allclose(law.probabilities, expected[law.token_ids], atol=1e-6)
    assert (law is not None) == (temperature <= 1.0)


def test_tokens_that_tie_at_the_cut_of_top_k_leave_the_law_undecided() -> None:
    top = TopTokens(np.array([3, 5, 8], dtype=np.uint32), np.log([0.4, 0.2, 0.2]), 0.0)
    assert distribution_of(top, NUM_TOKENS, SamplingFilters(top_k=2)) is None
    assert distribution_of(top, NUM_TOKENS, SamplingFilters(top_k=1)) is not None
