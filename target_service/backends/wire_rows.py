"""Turn distributions into the answer of a round: rows over supports, choices and logits.

These are the counterparts of `specdec.engine.logits.rows` for distributions over few tokens. The draws use the random
numbers of docs/protocol.md section 4, so a session gets the same tokens from any replica that states the same
distributions. Called by `engine`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.contract.types import DistributionRow, DrawRule, LogitRow, SessionPosition, TokenIds, VerifyRequest
from specdec.core.random import DrawKey, gumbel_noise, index_at_uniform
from specdec.core.sparse import integer_weights
from target_service.backends.contract import Distribution

_NO_TOKENS = np.empty(0, dtype=np.uint32)
_NO_LOGITS = np.empty(0, dtype=np.float32)


def distribution_rows(distributions: Sequence[Distribution], request: VerifyRequest) -> tuple[DistributionRow, ...]:
    """Return p over each support, with one tail token drawn outside it; the last distribution has an empty support."""
    position = request.position
    uniforms = DrawKey(position.seed, position.turn, position.committed_len).tail_uniforms(len(distributions) - 1)
    supports = [*request.support_ids, _NO_TOKENS]
    return tuple(map(_distribution_row, distributions, supports, uniforms))


def choices(distributions: Sequence[Distribution], position: SessionPosition) -> tuple[TokenIds, NDArray[np.float64]]:
    """Return the chosen token at each position of a greedy or coupled round, and the probability of each."""
    is_coupled = position.draw_rule is DrawRule.COUPLED and not position.filters.is_greedy
    entries = [
        _coupled_entry(distribution, position, position.committed_len + row)
        if is_coupled
        else int(np.argmax(distribution.probabilities))
        for row, distribution in enumerate(distributions)
    ]
    chosen = list(zip(distributions, entries, strict=True))
    token_ids = np.array([distribution.token_ids[entry] for distribution, entry in chosen], dtype=np.uint32)
    return token_ids, np.array([distribution.probabilities[entry] for distribution, entry in chosen])


def logit_rows(
    distributions: Sequence[Distribution], supports: Sequence[TokenIds], tail_ids: Sequence[int], num_logprobs: int
) -> tuple[LogitRow, ...]:
    """Return the raw logits of each position: on its support, of its tail token or choice, and of its top tokens."""
    padded = [*supports, *[_NO_TOKENS] * (len(distributions) - len(supports))]
    return tuple(_logit_row(*row, num_logprobs) for row in zip(distributions, padded, tail_ids, strict=True))


def _distribution_row(distribution: Distribution, support_ids: TokenIds, uniform: float) -> DistributionRow:
    entries, is_hit = _entries_of(distribution.token_ids, support_ids)
    outside = distribution.probabilities.copy()
    outside[entries[is_hit]] = 0.0
    weights = integer_weights(np.where(is_hit, distribution.probabilities[entries], 0.0), float(outside.sum()))
    if weights[-1] == 0:
        return DistributionRow(weights, -1, 0.0)
    drawn = index_at_uniform(outside, uniform)
    return DistributionRow(weights, int(distribution.token_ids[drawn]), float(distribution.probabilities[drawn]))


def _entries_of(sorted_ids: TokenIds, wanted_ids: TokenIds) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Return where each wanted id stands among the ascending ids, and whether it does."""
    entries = np.minimum(np.searchsorted(sorted_ids, wanted_ids), len(sorted_ids) - 1)
    return entries, sorted_ids[entries] == wanted_ids


def _coupled_entry(distribution: Distribution, position: SessionPosition, at: int) -> int:
    scores = np.log(distribution.probabilities) + gumbel_noise(position.seed, position.turn, at, distribution.token_ids)
    return int(np.argmax(scores))


def _logit_row(distribution: Distribution, support_ids: TokenIds, tail_id: int, num_logprobs: int) -> LogitRow:
    top = distribution.top
    if top is None:  # a request for logprobs is refused if the backend does not know them
        return LogitRow(np.full(len(support_ids), -np.inf, np.float32), -math.inf, 0.0, _NO_TOKENS, _NO_LOGITS)
    by_id = np.argsort(top.token_ids)
    ids, logits = top.token_ids[by_id], top.logits[by_id]
    entries, is_hit = _entries_of(ids, np.append(support_ids, np.uint32(max(tail_id, 0))))
    found = np.where(is_hit, logits[entries], -np.inf).astype(np.float32)
    return LogitRow(
        support_logits=found[:-1],
        tail_logit=float(found[-1]) if tail_id >= 0 else 0.0,
        logsumexp=top.logsumexp,
        top_token_ids=top.token_ids[:num_logprobs],
        top_logits=top.logits[:num_logprobs].astype(np.float32),
    )
