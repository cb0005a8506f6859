"""The distribution of a position after the filters, from the top K tokens or from a whole row of logits.

An engine's interface reports the logarithms of the probabilities of the top K tokens. With 1 <= top_k <= K the other
tokens have probability 0 after the filters, and the normaliser cancels inside the top k, so the distribution is exact.
With top_p or min_p alone the distribution is exact if all kept tokens are certainly among the K. That depends on the
mass of the other tokens after the temperature, which is known within bounds: `_tail_bounds`.

From a whole row of logits, the top tokens decide most distributions, and only the others take a whole sort, as in
`specdec.core.reference`. The order of the filters is that of docs/protocol.md section 2. Called by the backends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.contract.errors import Internal
from specdec.contract.types import SamplingFilters
from specdec.core.reference import processed_logits
from specdec.structured.matcher import Mask, no_legal_token
from target_service.backends.contract import Distribution, RowsRequest, TopTokens

#: Error of a probability that an engine computed in 32 bits, with room: it states logarithms rounded to 2^-22.
_ROUNDING = 2.0**-20


def num_wanted(filters: SamplingFilters, num_masked: int, largest: int) -> int:
    """Return how many top tokens to ask for first: enough for the filters if that is certain.

    With top-k this is one more, which shows whether tokens tie at the cut.

    Args:
        filters: filters of the request.
        num_masked: number of end tokens that are masked.
        largest: largest number that the engine reports.
    """
    num = 1 if filters.is_greedy else filters.top_k + 1 if filters.top_k else largest
    return min(num + num_masked, largest)


def may_decide(filters: SamplingFilters, num_top: int, vocabulary_size: int) -> bool:
    """Return whether the top tokens may decide a distribution; without a filter every token keeps its probability."""
    cuts = 0 < filters.top_k <= num_top or filters.top_p < 1.0 or filters.min_p > 0.0
    return filters.is_greedy or cuts or num_top >= vocabulary_size


def distribution_of(
    top: TopTokens, vocabulary_size: int, filters: SamplingFilters, masked: Collection[int] = ()
) -> Distribution | None:
    """Return the distribution that follows from the top tokens, or None if they do not decide it.

    Args:
        top: the top tokens, with logarithms of probabilities as logits.
        vocabulary_size: number of token ids.
        filters: filters without bias and penalties.
        masked: ids of end tokens that cannot be chosen here.
    """
    is_kept = (top.token_ids < vocabulary_size) & ~np.isin(top.token_ids, list(masked))
    if not is_kept.any():
        return None
    ids, logits = top.token_ids[is_kept], top.logits[is_kept]
    is_whole = len(top.token_ids) >= vocabulary_size
    if filters.is_greedy:
        best = ids[logits == logits[0]].min()
        return Distribution(np.array([best], dtype=np.uint32), np.ones(1), top)
    weights = np.exp((logits - logits[0]) / filters.temperature)  # [n], the first is 1
    if 0 < filters.top_k < len(ids) and not is_whole and logits[filters.top_k - 1] == logits[filters.top_k]:
        return None  # engines differ in which of equal tokens they keep
    if 0 < filters.top_k <= len(ids):
        return _distribution(ids, _filtered(weights[: filters.top_k], 0.0, filters), top)
    bounds = (0.0, 0.0) if is_whole else _tail_bounds(top, logits[0], vocabulary_size, filters, masked)
    kept = [_filtered(weights, tail, filters) for tail in bounds]
    if not np.array_equal(kept[0] > 0.0, kept[1] > 0.0):
        return None
    if not is_whole and not _ends_inside(weights, bounds[1], filters):
        return None
    return _distribution(ids, kept[0], top)


def _distribution(ids: NDArray[np.uint32], weights: NDArray[np.float64], top: TopTokens) -> Distribution:
    """Return the distribution with these weights, float64 [n], for the first n ids."""
    kept = np.flatnonzero(weights)
    ascending = kept[np.argsort(ids[kept])]
    return Distribution(ids[ascending], weights[ascending] / weights.sum(), top)


def _filtered(weights: NDArray[np.float64], tail: float, filters: SamplingFilters) -> NDArray[np.float64]:
    """Return descending weights with 0 for those that top-p and min-p remove; `tail` is the weight of all others."""
    kept = weights.copy()
    if filters.top_p < 1.0:
        mass_before = np.cumsum(weights) - weights
        mass_before[0] = 0.0
        kept[mass_before >= filters.top_p * (weights.sum() + tail)] = 0.0
    if filters.min_p > 0.0:
        kept[kept < filters.min_p] = 0.0  # the top token's weight is exactly 1
    return kept


def _ends_inside(weights: NDArray[np.float64], tail: float, filters: SamplingFilters) -> bool:
    """Return whether top-p or min-p certainly removes every token that is not known."""
    is_nucleus_known = filters.top_p < 1.0 and weights.sum() >= filters.top_p * (weights.sum() + tail)
    return bool(is_nucleus_known or weights[-1] < filters.min_p)


def _tail_bounds(
    top: TopTokens, largest: float, vocabulary_size: int, filters: SamplingFilters, masked: Collection[int]
) -> tuple[float, float]:
    """Return bounds of the weight of the other tokens that top-k keeps, as a multiple of the top token's weight.

    With a = 1 / T the weight of the tail is the sum of p^a over n tokens of mass t, each at most the smallest top
    probability s. For a >= 1 it is at most s^(a - 1) t, since p^a = p^(a - 1) p. For a < 1 that is a lower bound, and
    n^(1 - a) t^a an upper one, since p^a is concave.
    """
    num_tail = max(1, vocabulary_size - len(top.token_ids))
    mass = 1.0 - float(np.exp(top.logits).sum())
    slack = (len(top.token_ids) + 1) * _ROUNDING
    least, most = max(0.0, mass - slack) / np.exp(largest), (max(0.0, mass) + slack) / np.exp(largest)
    smallest, power = np.exp(top.logits[-1] - largest), 1.0 / filters.temperature

    def scaled(mass: float) -> float:
        return float(smallest ** (power - 1.0) * mass)

    def spread(mass: float) -> float:
        return float(num_tail ** (1.0 - power) * mass**power)

    low, high = (spread(least), scaled(most)) if power >= 1.0 else (scaled(least), spread(most))
    is_cut = filters.top_k > 0
    is_masked_outside = not np.isin(list(masked), top.token_ids).all()
    return (0.0 if is_masked_outside or is_cut else low), high


#: Number of top tokens that are tried first if top-k is off.
_NUM_FIRST = 256


def distributions_of(
    logits: NDArray[np.float32], rows_request: RowsRequest, masks: Sequence[Mask] = ()
) -> list[Distribution]:
    """Return the distributions of a question.

    Args:
        logits: float32 [num_rows, V].
        rows_request: the question.
        masks: masks of its first rows. A row beyond them follows a draft token that is illegal, or ends the output.

    Raises:
        InvalidRequest: the constraint allows no token that the model gives a probability (NO_LEGAL_TOKEN).
    """
    return [
        _of_weights(row, rows_request, index, masks[index] if index < len(masks) else None)
        for index, row in enumerate(logits)
    ]


def _of_weights(row: NDArray[np.float32], rows_request: RowsRequest, index: int, mask: Mask | None) -> Distribution:
    scores = _scores(row, rows_request, index, mask)
    distribution = _of_all(scores, rows_request.filters) if mask is None else _of_possible(scores, rows_request)
    if rows_request.num_logprobs is None:
        return distribution
    # The token that is emitted is among these: it is in the distribution's tokens or the top of the raw logits.
    return Distribution(
        distribution.token_ids, distribution.probabilities, _raw(row, distribution, rows_request.num_logprobs)
    )


def _scores(row: NDArray[np.float32], rows_request: RowsRequest, index: int, mask: Mask | None) -> NDArray[np.float64]:
    """Return the logits of a row after bias, penalties and masks: float64 [V]."""
    filters = rows_request.filters
    if mask is None and not (filters.logit_bias or filters.uses_history or rows_request.masks_end(index)):
        return row.astype(np.float64)
    legal = None if mask is None else np.unpackbits(mask, count=len(row), bitorder="little").view(np.bool_)
    history, output_start = rows_request.prefixes[index], rows_request.position.output_start
    return processed_logits(row, filters, history, output_start, legal)


def _of_possible(scores: NDArray[np.float64], rows_request: RowsRequest) -> Distribution:
    """Return the distribution of a constrained row. Masked tokens are left out first, because most tokens may be."""
    possible = np.flatnonzero(scores > -np.inf).astype(np.uint32)
    if not len(possible):
        assert rows_request.masks is not None  # the row has a mask
        raise no_legal_token(rows_request.masks.constraint)
    among = _of_all(scores[possible], rows_request.filters)
    return Distribution(possible[among.token_ids], among.probabilities)


def _of_all(scores: NDArray[np.float64], filters: SamplingFilters) -> Distribution:
    num_tokens = len(scores)
    num_first = min(num_tokens, 1 if filters.is_greedy else filters.top_k or _NUM_FIRST)
    distribution = None
    if may_decide(filters, num_first, num_tokens):
        distribution = distribution_of(top_tokens(scores, num_first), num_tokens, filters)
    if distribution is None:
        distribution = distribution_of(top_tokens(scores, num_tokens), num_tokens, filters)
    assert distribution is not None  # all tokens decide every distribution
    return distribution


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
