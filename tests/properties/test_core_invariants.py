"""Invariants of the core on arbitrary input."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from specdec.contract.types import WEIGHT_TOTAL, SamplingFilters, TokenSource
from specdec.core.block import acceptance_levels, verify_block
from specdec.core.chain import ChainHasher
from specdec.core.random import DrawKey
from specdec.core.reference import chain_hash, cut_support, distribution_row, filtered_distribution
from specdec.core.rejection import verify_rejection
from specdec.core.sparse import draw_from_support
from specdec.engine.logits.filters import filtered_distributions, stable_topk
from specdec.engine.logits.penalties import FilterContext

QUICK = settings(max_examples=80, deadline=None, derandomize=True)


def distributions(size: int) -> st.SearchStrategy[np.ndarray]:
    """Return distributions with zeros, ties and masses from 1 down to 1e-15."""
    exponents = npst.arrays(
        np.float64, size, elements=st.one_of(st.just(-np.inf), st.integers(-15, 0), st.floats(-3, 0))
    )
    return (
        exponents.map(lambda e: 10.0**e)
        .filter(lambda weights: weights.sum() > 0)
        .map(lambda weights: weights / weights.sum())
    )


keys = st.builds(DrawKey, st.integers(0, 2**64 - 1), st.integers(0, 100), st.integers(0, 2**20))
uniforms = st.floats(0, 1, exclude_min=True, exclude_max=True)
#: Up to which token a hasher is extended, other tokens that it is extended by, and how many tokens it keeps.
edits = st.tuples(st.integers(0, 70), st.lists(st.integers(0, 9), max_size=20), st.integers(0, 70))


@QUICK
@given(distribution=distributions(30), s_max=st.integers(1, 30), coverage=st.floats(0.01, 1.0), key=keys)
def test_supports_are_ascending_positive_and_hold_what_is_drawn(distribution, s_max, coverage, key) -> None:
    support, lost = cut_support(distribution, s_max, coverage)
    assert 1 <= len(support.token_ids) <= s_max
    assert (np.diff(support.token_ids.astype(np.int64)) > 0).all()
    assert (support.weights > 0).all()
    assert (distribution[support.token_ids] > 0).all()
    assert 0.0 <= lost < 1.0
    assert draw_from_support(support, key, 0) in support.token_ids


@QUICK
@given(distribution=distributions(30), ids=st.sets(st.integers(0, 29)), uniform=uniforms)
def test_rows_sum_to_the_total_and_a_tail_token_comes_with_tail_mass(distribution, ids, uniform) -> None:
    support_ids = np.array(sorted(ids), dtype=np.uint32)
    row = distribution_row(distribution, support_ids, uniform)
    assert row.weights.dtype == np.uint32
    assert row.weights.sum(dtype=np.int64) == WEIGHT_TOTAL
    assert len(row.weights) == len(ids) + 1
    assert (row.weights[-1] > 0) == (row.tail_token_id >= 0)
    np.testing.assert_allclose(
        row.weights[:-1] / WEIGHT_TOTAL, distribution[support_ids], rtol=0, atol=31 / WEIGHT_TOTAL
    )
    if row.tail_token_id >= 0:
        assert row.tail_token_id not in ids
        assert row.tail_probability == distribution[row.tail_token_id] > 0


@QUICK
@given(
    q=st.lists(distributions(8), min_size=1, max_size=3), p=st.lists(distributions(8), min_size=4, max_size=4), key=keys
)
def test_decisions_keep_a_prefix_of_the_draft_and_add_one_token(q, p, key) -> None:
    supports = [cut_support(distribution, 5)[0] for distribution in q]
    drafts = [draw_from_support(support, key, index) for index, support in enumerate(supports)]
    ids = [*(support.token_ids for support in supports), np.empty(0, dtype=np.uint32)]
    rows = [
        distribution_row(distribution, support_ids, uniform)
        for distribution, support_ids, uniform in zip(p, ids, key.tail_uniforms(len(drafts)), strict=False)
    ]
    shares, levels = acceptance_levels(drafts, supports, rows)
    assert all(0.0 <= value <= 1.0 for value in shares + levels)
    for verify in (verify_rejection, verify_block):
        decision = verify(drafts, supports, rows, key)
        assert decision == verify(drafts, supports, rows, key)
        num_emitted = len(decision.token_ids)
        assert num_emitted == decision.num_accepted + 1
        assert len(decision.sources) == len(decision.p) == len(decision.q) == num_emitted
        assert list(decision.token_ids[:-1]) == drafts[: decision.num_accepted]
        full = decision.num_accepted == len(drafts)
        assert decision.sources[-1] is (TokenSource.BONUS if full else TokenSource.CORRECTED)
        assert all(0.0 < value <= 1.0 for value in decision.p)
        # Every emitted token has mass under the target: a token that p excludes is never emitted.
        assert all(p[index][token_id] > 0 for index, token_id in enumerate(decision.token_ids))


@QUICK
@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=70), edits=st.lists(edits, max_size=12))
def test_a_chain_hash_does_not_depend_on_how_the_tokens_were_split(tokens, edits) -> None:
    hasher = ChainHasher()
    for end, junk, kept in [*edits, (len(tokens), [], len(tokens))]:
        hasher.extend(tokens[len(hasher) : end])
        length = len(hasher)
        hasher.extend(np.array(junk, dtype=np.uint32))
        hasher.truncate(min(length, kept))
    assert hasher.at(len(tokens)) == chain_hash(tokens)
    for length in range(len(tokens) + 1):
        assert hasher.at(length) == chain_hash(tokens[:length])


@QUICK
@given(
    values=npst.arrays(np.float32, (3, 40), elements=st.sampled_from([-np.inf, -1.5, 0.0, 0.25, 7.0])),
    num=st.integers(1, 45),
)
def test_the_top_tokens_are_those_of_a_stable_sort(values, num) -> None:
    top, ids = stable_topk(torch.tensor(values), num, floor=-torch.inf)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :num]
    np.testing.assert_array_equal(top.numpy(), np.take_along_axis(values, order, axis=-1))
    matters = top.numpy() > -np.inf
    np.testing.assert_array_equal(ids.numpy()[matters], order[matters])


@QUICK
@given(
    logits=npst.arrays(np.float32, 24, elements=st.floats(-30, 30, width=16)),
    filters=st.builds(
        SamplingFilters,
        temperature=st.floats(0.125, 4.0),
        top_k=st.integers(0, 30),
        top_p=st.floats(0.01, 1.0),
        min_p=st.floats(0.0, 0.9),
        repetition_penalty=st.floats(0.5, 2.0),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
    ),
    history=st.lists(st.integers(0, 23), max_size=12),
)
def test_filtered_distributions_sum_to_one_and_both_implementations_agree(logits, filters, history) -> None:
    reference = filtered_distribution(logits, filters, history, len(history) // 2)
    twin = filtered_distributions(torch.tensor(logits[None]), [FilterContext(filters, history, len(history) // 2)])[
        0
    ].numpy()
    for values in (reference, twin):
        assert abs(values.sum() - 1.0) < 1e-12
        assert (values >= 0).all()
        assert not filters.top_k or np.count_nonzero(values) <= filters.top_k
    # A threshold that is met to the last bit may round either way; the cut then differs by one token.
    if np.array_equal(reference > 0, twin > 0):
        np.testing.assert_allclose(twin, reference, rtol=0, atol=1e-13)
    else:
        assert abs(np.count_nonzero(reference) - np.count_nonzero(twin)) <= 1
