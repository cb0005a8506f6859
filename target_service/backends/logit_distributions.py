"""The distribution of a position from a whole row of logits, in numpy.

The filters are those of `specdec.core.reference`, which sorts every token. Here the top tokens decide most
distributions (`top_distributions`), and only distributions that they do not decide take a whole sort. Called by
backends that know all logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.contract.errors import Internal
from specdec.core.reference import processed_logits
from target_service.backends.contract import Distribution, RowsRequest, TopTokens
from target_service.backends.top_distributions import distribution_of, may_decide

#: Number of top tokens that are tried first where top-k is off.
_NUM_FIRST = 256


def distributions_of(logits: NDArray[np.float32], rows_request: RowsRequest) -> list[Distribution]:
    """Return the distributions of a question from float32 [num_rows, V] logits."""
    return [_distribution(row, rows_request, index) for index, row in enumerate(logits)]


def _distribution(row: NDArray[np.float32], rows_request: RowsRequest, index: int) -> Distribution:
    filters, history = rows_request.filters, rows_request.prefixes[index]
    if filters.logit_bias or filters.uses_history or rows_request.masks_end(index):
        scores = processed_logits(row, filters, history, rows_request.position.output_start)
    else:
        scores = row.astype(np.float64)
    num_tokens = len(scores)
    num_first = min(num_tokens, 1 if filters.is_greedy else filters.top_k or _NUM_FIRST)
    distribution = None
    if may_decide(filters, num_first, num_tokens):
        distribution = distribution_of(top_tokens(scores, num_first), num_tokens, filters)
    if distribution is None:
        distribution = distribution_of(top_tokens(scores, num_tokens), num_tokens, filters)
    assert distribution is not None  # all tokens decide every distribution
    if rows_request.num_logprobs is None:
        return distribution
    # The token that is emitted is among these: it is in the distribution's tokens or the top of the raw logits.
    return Distribution(
        distribution.token_ids, distribution.probabilities, _raw(row, distribution, rows_request.num_logprobs)
    )


def top_tokens(scores: NDArray[np.floating[Any]], num_top: int) -> TopTokens:
    """Return the top tokens, lower ids first among equal ones, with logarithms of their probabilities.

    Raises:
        Internal: a logit is NaN, or none is finite.
    """
    maximum = scores.max()
    if not np.isfinite(maximum):  # NaN wins every maximum
        raise Internal("the engine returned logits that are not finite")
    logsumexp = float(maximum + np.log(np.exp(scores - maximum).sum()))
    if num_top < len(scores):
        cut = np.partition(scores, len(scores) - num_top)[len(scores) - num_top]
        candidates = np.flatnonzero(scores >= cut)
    else:
        candidates = np.arange(len(scores))
    ordered = candidates[np.argsort(-scores[candidates], kind="stable")][:num_top]
    return TopTokens(ordered.astype(np.uint32), scores[ordered].astype(np.float64) - logsumexp, 0.0)


def _raw(row: NDArray[np.float32], distribution: Distribution, num_logprobs: int) -> TopTokens:
    """Return the raw logits of the top tokens, followed by those of the distribution's other tokens."""
    top = top_tokens(row.astype(np.float64), min(len(row), max(1, num_logprobs)))
    others = np.setdiff1d(distribution.token_ids, top.token_ids)
    offset = float(row[top.token_ids[0]]) - top.logits[0]
    logits = np.concatenate([top.logits, row[others].astype(np.float64) - offset])
    return TopTokens(np.concatenate([top.token_ids, others]).astype(np.uint32), logits, 0.0)
