"""Range checks of sampling filters and token ids that hold for every replica of a vocabulary.

`specdec.rpc.rounds` and `specdec.engine.sessions.request_checks` call them, so a replica's wire and its engine refuse
the same values. The limits of a client's request are checked by the coordinator.
"""

from __future__ import annotations

import math

from specdec.errors import InvalidRequest
from specdec.types import SamplingFilters, TokenIds

_FEW = 32


def check_filters(filters: SamplingFilters, vocabulary_size: int) -> None:
    """Refuse filters with a value out of range.

    Raises:
        InvalidRequest: naming the field, as `round.law.…`, and its limit.
    """
    # Written so that NaN fails every comparison.
    limits = (
        ("temperature", filters.temperature, 0.0 <= filters.temperature < math.inf, "finite and at least 0"),
        ("top_p", filters.top_p, 0.0 < filters.top_p <= 1.0, "in (0, 1]"),
        ("top_k", filters.top_k, filters.top_k >= 0, "at least 0"),
        ("min_p", filters.min_p, 0.0 <= filters.min_p < 1.0, "in [0, 1)"),
        (
            "repetition_penalty",
            filters.repetition_penalty,
            0.0 < filters.repetition_penalty < math.inf,
            "finite and above 0",
        ),
        ("presence_penalty", filters.presence_penalty, math.isfinite(filters.presence_penalty), "finite"),
        ("frequency_penalty", filters.frequency_penalty, math.isfinite(filters.frequency_penalty), "finite"),
    )
    for name, value, holds, limit in limits:
        if not holds:
            raise InvalidRequest(f"round.law.{name} is {value}; it must be {limit}", field=f"round.law.{name}")
    for token_id, bias in filters.logit_bias.items():
        if not (0 <= token_id < vocabulary_size and math.isfinite(bias)):
            raise InvalidRequest(
                f"round.law.logit_bias maps token id {token_id} to {bias}; ids are below {vocabulary_size} and biases "
                "finite",
                field="round.law.logit_bias",
            )
    if any(not 0 <= token_id < vocabulary_size for token_id in filters.end_token_ids):
        raise InvalidRequest(
            f"round.law.end_token_ids must be below {vocabulary_size}", field="round.law.end_token_ids"
        )


def check_token_ids(token_ids: TokenIds, vocabulary_size: int, field: str) -> None:
    """Refuse token ids outside the vocabulary.

    Raises:
        InvalidRequest: naming `field`.
    """
    if not len(token_ids):
        return
    # For the few tokens of a round, comparing ints is faster than an array reduction.
    largest = int(token_ids.max()) if len(token_ids) > _FEW else max(token_ids.tolist())
    if largest >= vocabulary_size:
        raise InvalidRequest(
            f"{field} holds token id {largest}; the vocabulary has {vocabulary_size} tokens", field=field
        )
