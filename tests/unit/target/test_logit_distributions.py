"""Laws from whole rows of logits, compared with the reference filters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.contract.errors import Internal
from specdec.contract.types import DrawRule, SamplingFilters, SessionPosition
from specdec.core.reference import filtered_distribution
from target_service.backends.contract import RowsRequest
from target_service.backends.filtered_distributions import distributions_of, top_tokens

NUM_TOKENS = 700  # more than the likeliest tokens that are tried first

filters = st.builds(
    SamplingFilters,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.8]),
    top_k=st.sampled_from([0, 1, 30, 500]),
    top_p=st.sampled_from([1.0, 0.99, 0.5]),
    min_p=st.sampled_from([0.0, 0.02]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    logit_bias=st.sampled_from([{}, {5: 4.0, 9: -3.0}]),
    min_new_tokens=st.sampled_from([0, 4]),
    end_token_ids=st.just((7, 11)),
)


def question(sampling: SamplingFilters, num_rows: int) -> RowsRequest:
    tokens = np.arange(1, 9, dtype=np.uint32)
    position = SessionPosition(
        "s", 1, 0, 0, b"", tokens, sampling, seed=1, turn=0, output_start=5, draw_rule=DrawRule.DISTRIBUTION
    )
    return RowsRequest(position, tokens, num_rows, num_logprobs=3)


@given(st.integers(0, 2**32), st.sampled_from([0.5, 3.0]), filters)
def test_laws_are_the_reference_distributions_of_each_position(
    seed: int, spread: float, sampling: SamplingFilters
) -> None:
    logits = np.random.default_rng(seed).normal(scale=spread, size=(3, NUM_TOKENS)).astype(np.float32)
    asked = question(sampling, 3)
    for row, law, prefix in zip(logits, distributions_of(logits, asked), asked.prefixes, strict=True):
        dense = np.zeros(NUM_TOKENS)
        dense[law.token_ids] = law.probabilities
        np.testing.assert_allclose(dense, filtered_distribution(row, sampling, prefix, 5), atol=1e-12)


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_the_likeliest_tokens_are_ordered_and_lower_ids_come_first_among_equal_ones(seed: int, num_top: int) -> None:
    scores = np.random.default_rng(seed).integers(0, 6, size=40).astype(np.float64)
    top = top_tokens(scores, num_top)
    assert top.token_ids.tolist() == np.argsort(-scores, kind="stable")[:num_top].tolist()
    np.testing.assert_allclose(np.exp(top_tokens(scores, 40).logits).sum(), 1.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("num_top", [1, 40])
def test_logits_that_are_not_finite_are_refused(value: float, num_top: int) -> None:
    scores = np.zeros(40)
    scores[7 if value != -np.inf else slice(None)] = value
    with pytest.raises(Internal, match="not finite"):
        top_tokens(scores, num_top)
