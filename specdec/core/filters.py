"""From logits to p (or q): bias, penalties, masks, temperature, top-k, top-p, min-p (docs/protocol.md section 2).

One position at a time, in float64, and slow: this is the reference. The engines run the batched twin in
`specdec.engine.logits.rows`. Order and meaning are Hugging Face's; presence and frequency penalties are OpenAI's. Where
values tie, the lower id goes first, so top-k keeps exactly k tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.types import SamplingFilters, TokenIds


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
        likeliest_first = weights[order]
        mass_before = np.concatenate(([0.0], np.cumsum(likeliest_first)[:-1]))
        weights[order[mass_before >= filters.top_p * likeliest_first.sum()]] = 0.0
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
