"""Reference maths: one position at a time, in float64, slow and simple. No service calls it.

Tests compare the batched computations of the engines (`specdec.engine.logits`) and the values that rounds decide on
with these functions: logits to p or q (docs/protocol.md section 2: bias, penalties, masks, temperature, top-k, top-p,
min-p; order and meaning are those of Hugging Face, presence and frequency penalties those of OpenAI), the cut to a
support, p over a support, the coupled choice, and the chain hash of a whole sequence. Among equal values the lower id
comes first, so top-k keeps exactly k tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.contract.types import DistributionRow, SamplingFilters, Support, TokenIds
from specdec.core.chain import ChainHasher
from specdec.core.random import gumbel_noise, index_at_uniform
from specdec.core.sparse import DEFAULT_COVERAGE, integer_weights, support_of_top


def filtered_distribution(
    logits: NDArray[np.floating[Any]],
    filters: SamplingFilters,
    history: TokenIds | Sequence[int],
    output_start: int,
    legal: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """Return the distribution of the token at one position.

    Args:
        logits: float [V], fp32 or wider; -inf for a masked id.
        filters: the request's filters.
        history: all session tokens before the position, draft tokens included.
        output_start: position of this turn's first output token.
        legal: bool [V], the tokens that a constraint allows, at least one; None: all.

    Returns:
        float64 [V], sums to 1; one-hot when greedy.
    """
    scores = processed_logits(logits, filters, history, output_start, legal)
    if filters.is_greedy:
        one_hot = np.zeros(len(scores))
        one_hot[np.argmax(scores)] = 1.0
        return one_hot
    scaled = scores / filters.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-scaled, kind="stable")
    if filters.top_k > 0:
        weights[order[filters.top_k :]] = 0.0
    if filters.top_p < 1.0:
        top_first = weights[order]
        mass_before = np.concatenate(([0.0], np.cumsum(top_first)[:-1]))
        weights[order[mass_before >= filters.top_p * top_first.sum()]] = 0.0
    if filters.min_p > 0.0:
        weights[weights < filters.min_p] = 0.0  # the top token's weight is exactly 1
    normalised: NDArray[np.float64] = weights / weights.sum()
    return normalised


def processed_logits(
    logits: NDArray[np.floating[Any]],
    filters: SamplingFilters,
    history: TokenIds | Sequence[int],
    output_start: int,
    legal: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """Return logits after bias, penalties and the masks of the constraint and of min_new_tokens: float64 [V].

    Arguments are as in `filtered_distribution`. The mask of min_new_tokens is not applied if it would leave no token.
    """
    scores = np.array(logits, dtype=np.float64)
    for token_id, bias in filters.logit_bias.items():
        scores[token_id] += bias
    tokens = np.asarray(history, dtype=np.int64)
    if filters.repetition_penalty != 1.0:
        seen = np.unique(tokens)
        values = scores[seen]
        scores[seen] = np.where(values < 0, values * filters.repetition_penalty, values / filters.repetition_penalty)
    if filters.presence_penalty != 0.0 or filters.frequency_penalty != 0.0:
        emitted, counts = np.unique(tokens[output_start:], return_counts=True)
        scores[emitted] -= filters.presence_penalty + filters.frequency_penalty * counts
    if legal is not None:
        scores[~legal] = -np.inf
    if filters.end_token_ids and len(tokens) - output_start < filters.min_new_tokens:
        masked = scores.copy()
        masked[list(filters.end_token_ids)] = -np.inf
        if masked.max() > -np.inf:
            return masked
    return scores


def cut_support(
    distribution: NDArray[np.float64], s_max: int, coverage: float = DEFAULT_COVERAGE
) -> tuple[Support, float]:
    """Cut a distribution to the fewest top tokens that cover `coverage`, at most `s_max`, in integer weights.

    The cut depends on the distribution alone, so it is exact for any later draw. Among equal values the lower id comes
    first.

    Args:
        distribution: float64 [V], sums to 1.
        s_max: 1..MAX_SUPPORT.
        coverage: (0, 1].

    Returns:
        The support, and the probability mass outside it (0..1).
    """
    top = np.argsort(-distribution, kind="stable")[:s_max]
    return support_of_top(top, distribution[top], coverage)


def distribution_row(
    distribution: NDArray[np.float64], support_ids: TokenIds | Sequence[int], tail_uniform: float
) -> DistributionRow:
    """Return p over a support: integer weights on it, the tail mass, and one token drawn from the tail.

    Args:
        distribution: float64 [V], sums to 1.
        support_ids: ascending ids of S; empty at the bonus position, where the tail token is a draw of p itself.
        tail_uniform: (0, 1), chooses the tail token.
    """
    ids = np.asarray(support_ids, dtype=np.int64)
    outside = distribution.copy()
    outside[ids] = 0.0
    weights = integer_weights(distribution[ids], float(outside.sum()))
    if weights[-1] == 0:
        return DistributionRow(weights=weights, tail_token_id=-1, tail_probability=0.0)
    tail_token_id = index_at_uniform(outside, tail_uniform)
    return DistributionRow(
        weights=weights, tail_token_id=tail_token_id, tail_probability=float(distribution[tail_token_id])
    )


def coupled_choice(distribution: NDArray[np.float64], seed: int, turn: int, position: int) -> int:
    """Return the token that a distribution (float64 [V]) chooses at an absolute position.

    Over random seeds the token is distributed as `distribution`.
    """
    support = np.flatnonzero(distribution)
    scores = np.log(distribution[support]) + gumbel_noise(seed, turn, position, support.astype(np.uint32))
    return int(support[np.argmax(scores)])


def chain_hash(token_ids: TokenIds | Sequence[int]) -> bytes:
    """Return the chain hash of a whole token sequence, 16 bytes; equals `ChainHasher(token_ids).at(len(token_ids))`."""
    return ChainHasher(token_ids).at(len(token_ids))
