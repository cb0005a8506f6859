"""Range checks that hold for every replica: of sampling filters, of token ids, and of a replica's own description.

`specdec.rpc` checks requests as it decodes them. The limits of a client's request are checked by the coordinator. The
registry and the coordinator check descriptions.
"""

from __future__ import annotations

import math

from specdec.contract.engine_api import MAX_ADAPTERS, EngineInfo, is_adapter_name
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import FILTER_RANGES, SamplingFilters, TokenIds

_FEW = 32

#: Longest text in a replica's description; a model may be a long path.
MAX_NAME_CHARACTERS = 4096

#: Largest number of draft tokens in a round of any replica.
MAX_GAMMA = 256

#: Longest time that a replica may expect of a step.
_MOST_STEP_S = 86_400.0


def check_filters(filters: SamplingFilters, vocabulary_size: int) -> None:
    """Refuse filters with a value out of range.

    Raises:
        InvalidRequest: naming the field, as `round.law.…`, and its limit.
    """
    for name, range_ in FILTER_RANGES.items():
        if not range_.holds(value := getattr(filters, name)):
            may_be_infinite = isinstance(range_.default, float) and not range_.is_bounded
            limit = " and ".join(filter(None, ("finite" if may_be_infinite else "", range_.words)))
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


def check_description(info: EngineInfo) -> None:
    """Refuse a replica's description with a value that no replica can have.

    Raises:
        ValueError: the message names the field, its value and its limit.
    """
    limits = (
        ("kv_usage", info.kv_usage, 0.0 <= info.kv_usage <= 1.0, "in 0..1"),
        ("step_limit_s", info.step_limit_s, 0.0 <= info.step_limit_s <= _MOST_STEP_S, f"in 0..{_MOST_STEP_S:g}"),
        ("max_gamma", info.max_gamma, info.max_gamma <= MAX_GAMMA, f"at most {MAX_GAMMA}"),
    )
    for name, value, holds, limit in limits:
        if not holds:
            raise ValueError(f"{name} is {value}; it must be {limit}")
    for name in EngineInfo.__dataclass_fields__:
        value, most = getattr(info, name), MAX_NAME_CHARACTERS
        if isinstance(value, str | tuple) and len(value) > most:
            raise ValueError(f"{name} has a length of {len(value)}; the limit is {most}")
    _check_adapters(info)


def _check_adapters(info: EngineInfo) -> None:
    names, fingerprints = info.adapter_names, info.adapter_fingerprints
    if len(names) != len(fingerprints) or len(names) > MAX_ADAPTERS:
        raise ValueError(
            f"{len(names)} adapter_names and {len(fingerprints)} adapter_fingerprints; they must be as many, and at "
            f"most {MAX_ADAPTERS}"
        )
    if not all(map(is_adapter_name, names)) or len(set(names)) < len(names):
        raise ValueError("adapter_names must be different texts of 1 to 128 printable ASCII characters without spaces")
    if len({info.model_fingerprint, "", *fingerprints}) < len(fingerprints) + len({info.model_fingerprint, ""}):
        raise ValueError("adapter_fingerprints must be different, none of them empty or that of the base model")
