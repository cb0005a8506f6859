"""Reference maths: one position at a time, in float64, slow and plain. Nothing that serves calls it.

What the engines compute in batches (`specdec.engine.logits`) and the rounds decide on is held against these by tests:
logits to p or q (docs/protocol.md section 2: bias, penalties, masks, temperature, top-k, top-p, min-p; order and
meaning are Hugging Face's, presence and frequency penalties are OpenAI's), the cut to a support, p seen through one,
the coupled choice, the chain hash of a whole sequence. Where values tie, the lower id goes first, so top-k keeps
exactly k tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.core.chain import ChainHasher
from specdec.core.random import gumbel_noise, index_at_uniform
from specdec.core.sparse import DEFAULT_COVERAGE, integer_weights, support_of_top
from specdec.types import DistributionRow, SamplingFilters, Support, TokenIds


def filtered_distribution(
    logits: NDArray[np.floating[Any]], filters: SamplingFilters, history: TokenIds | Sequence[int], output_start: int
) -> NDArray[np.float64]:
    """The law of the token at one position.

    Args:
        logits: float [V], fp32 or wider; -inf where an id is masked.
        law: the request's filters.
        history: all session tokens before the position, draft tokens included.
        output_start: position of this turn's first output token.

    Returns:
        float64 [V], sums to 1; one-hot when greedy.
    """
    scores = processed_logits(logits, filters, history, output_start)
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
        weights[weights < filters.min_p] = 0.0  # the likeliest token's weight is exactly 1
    normalised: NDArray[np.float64] = weights / weights.sum()
    return normalised


def processed_logits(
    logits: NDArray[np.floating[Any]], filters: SamplingFilters, history: TokenIds | Sequence[int], output_start: int
) -> NDArray[np.float64]:
    """Logits after bias, penalties and the min_new_tokens mask, float64 [V]; arguments as in `filtered_distribution`.

    A mask that would leave no token at all is not applied.
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
    if filters.end_token_ids and len(tokens) - output_start < filters.min_new_tokens:
        masked = scores.copy()
        masked[list(filters.end_token_ids)] = -np.inf
        if masked.max() > -np.inf:
            return masked
    return scores


def cut_support(law: NDArray[np.float64], s_max: int, coverage: float = DEFAULT_COVERAGE) -> tuple[Support, float]:
    """Cuts a law to the fewest likeliest tokens that cover `coverage`, at most `s_max`, in integer weights.

    Looks at the law only, so it is exact whatever is drawn afterwards. Ties go to the lower id.

    Args:
        law: float64 [V], sums to 1.
        s_max: 1..MAX_SUPPORT.
        coverage: (0, 1].

    Returns:
        The support, and the law mass outside it (0..1).
    """
    likeliest = np.argsort(-law, kind="stable")[:s_max]
    return support_of_top(likeliest, law[likeliest], coverage)


def distribution_row(
    law: NDArray[np.float64], support_ids: TokenIds | Sequence[int], tail_uniform: float
) -> DistributionRow:
    """p seen through a support: integer weights on it, the rest, and one token drawn from the rest.

    Args:
        law: float64 [V], sums to 1.
        support_ids: ascending ids of S; empty at the bonus position, where z is a draw of p itself.
        tail_uniform: (0, 1), decides z.
    """
    ids = np.asarray(support_ids, dtype=np.int64)
    outside = law.copy()
    outside[ids] = 0.0
    weights = integer_weights(law[ids], float(outside.sum()))
    if weights[-1] == 0:
        return DistributionRow(weights=weights, tail_token_id=-1, tail_probability=0.0)
    tail_token_id = index_at_uniform(outside, tail_uniform)
    return DistributionRow(weights=weights, tail_token_id=tail_token_id, tail_probability=float(law[tail_token_id]))


def coupled_choice(law: NDArray[np.float64], seed: int, turn: int, position: int) -> int:
    """The token that a law (float64 [V]) chooses at an absolute position; distributed as the law over seeds."""
    support = np.flatnonzero(law)
    scores = np.log(law[support]) + gumbel_noise(seed, turn, position, support.astype(np.uint32))
    return int(support[np.argmax(scores)])


def chain_hash(token_ids: TokenIds | Sequence[int]) -> bytes:
    """Chain hash of a whole token sequence, 16 bytes; equals `ChainHasher(token_ids).at(len(token_ids))`."""
    return ChainHasher(token_ids).at(len(token_ids))
