"""The law of a position from a whole row of logits, in numpy.

The filters are those of `specdec.core.reference`, which sorts every token. Here the likeliest tokens decide most laws
(`top_laws`), and only laws that they do not decide take a whole sort. Called by backends that know all logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.contract.errors import Internal
from specdec.core.reference import processed_logits
from target_service.backends.contract import Law, Question, TopTokens
from target_service.backends.top_laws import law_of, may_decide

#: Number of likeliest tokens that are tried first where top-k is off.
_NUM_FIRST = 256


def laws_of(logits: NDArray[np.float32], question: Question) -> list[Law]:
    """Return the laws of a question from float32 [num_rows, V] logits."""
    return [_law(row, question, index) for index, row in enumerate(logits)]


def _law(row: NDArray[np.float32], question: Question, index: int) -> Law:
    filters, history = question.filters, question.prefixes[index]
    if filters.logit_bias or filters.uses_history or question.masks_end(index):
        scores = processed_logits(row, filters, history, question.position.output_start)
    else:
        scores = row.astype(np.float64)
    num_tokens = len(scores)
    num_first = min(num_tokens, 1 if filters.is_greedy else filters.top_k or _NUM_FIRST)
    law = None
    if may_decide(filters, num_first, num_tokens):
        law = law_of(top_tokens(scores, num_first), num_tokens, filters)
    if law is None:
        law = law_of(top_tokens(scores, num_tokens), num_tokens, filters)
    assert law is not None  # all tokens decide every law
    if question.num_logprobs is None:
        return law
    # The token that is emitted is among these: it is in the law's tokens or the likeliest of the raw logits.
    return Law(law.token_ids, law.probabilities, _raw(row, law, question.num_logprobs))


def top_tokens(scores: NDArray[np.floating[Any]], num_top: int) -> TopTokens:
    """Return the likeliest tokens, lower ids first among equal ones, with logarithms of their probabilities.

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


def _raw(row: NDArray[np.float32], law: Law, num_logprobs: int) -> TopTokens:
    """Return the raw logits of the likeliest tokens, followed by those of the law's other tokens."""
    top = top_tokens(row.astype(np.float64), min(len(row), max(1, num_logprobs)))
    others = np.setdiff1d(law.token_ids, top.token_ids)
    offset = float(row[top.token_ids[0]]) - top.logits[0]
    logits = np.concatenate([top.logits, row[others].astype(np.float64) - offset])
    return TopTokens(np.concatenate([top.token_ids, others]).astype(np.uint32), logits, 0.0)
