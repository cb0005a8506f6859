"""Batched filters, and a replica, give the distributions of the reference for all sampling parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.replicas.replica import TARGET
from specdec.contract.types import WEIGHT_TOTAL, SamplingFilters, VerifyRequest
from specdec.core.reference import filtered_distribution
from specdec.engine.logits.filters import filtered_distributions
from specdec.engine.logits.penalties import FilterContext
from target_service.verifier import Verifier
from tests.support.round_driver import make_round
from tests.support.table_services import linked
from tests.support.table_worker import TableWorker

#: Values below, at and above the number of candidates that a cut examines first.
_SIZES = (3, 511, 512, 513, 1200, 9000)

_MOST = 2**32 - 1


@st.composite
def _params(draw: st.DrawFn, num_tokens: int) -> SamplingFilters:
    off_by_few = st.integers(-2, 2).map(lambda offset: max(0, num_tokens + offset))
    return SamplingFilters(
        temperature=draw(st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0, 1e4, 1e30])),
        top_k=draw(st.one_of(st.sampled_from([0, 1, 2, 511, 512, 513, _MOST]), off_by_few)),
        top_p=draw(st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0 - 2.0**-24, 1.0 - 1e-9, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.9])),
    )


@st.composite
def _cases(draw: st.DrawFn) -> tuple[np.ndarray, list[SamplingFilters]]:
    """Return float32 [R, V] logits of several kinds, and R parameter sets."""
    num_tokens = draw(st.sampled_from(_SIZES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for kind in draw(st.lists(st.sampled_from(["spread", "flat", "ties", "equal", "masked"]), min_size=1, max_size=4)):
        row = rng.normal(0.0, 0.01 if kind == "flat" else 3.0, num_tokens)
        if kind == "ties":
            row = np.round(row)
        if kind == "equal":
            row = np.zeros(num_tokens)
        if kind == "masked":
            row[rng.random(num_tokens) < 0.7] = -np.inf
            row[int(rng.integers(num_tokens))] = 0.0
        rows.append(row.astype(np.float32))
    return np.stack(rows), [draw(_params(num_tokens)) for _ in rows]


@settings(deadline=None, max_examples=150)
@given(_cases())
def test_batched_filters_equal_the_reference(case: tuple[np.ndarray, list[SamplingFilters]]) -> None:
    logits, params = case
    contexts = [FilterContext(law, (), 0) for law in params]
    batched = filtered_distributions(torch.from_numpy(logits), contexts).numpy()
    for row, law in enumerate(params):
        expected = filtered_distribution(logits[row], law, (), 0)
        np.testing.assert_allclose(batched[row], expected, rtol=1e-9, atol=1e-15, err_msg=str(law))
        assert np.array_equal(batched[row] > 0, expected > 0), law


@pytest.mark.parametrize("top_k", [1999, 2000, 2001, _MOST])
async def test_a_replica_keeps_every_token_that_top_k_keeps(top_k: int) -> None:
    worker = TableWorker(vocabulary_size=2000)
    verifier = Verifier(worker)
    law = SamplingFilters(temperature=1.0, top_k=top_k, top_p=1.0)
    tokens, all_ids = [3, 4, 5], np.arange(2000, dtype=np.uint32)
    async with linked(TARGET, verifier) as link:
        answer = await link.verify(VerifyRequest(make_round(tokens, filters=law), all_ids[7:8], (all_ids,)))
    await verifier.close()
    weights = answer.rows[0].weights
    assert weights.sum() == WEIGHT_TOTAL
    expected = filtered_distribution(worker.logits_after(tokens), law, tokens, len(tokens))
    np.testing.assert_allclose(weights[:-1] / WEIGHT_TOTAL, expected, atol=2e-9)
    assert np.count_nonzero(weights[:-1]) >= np.count_nonzero(expected > 1e-6) > 512
