"""The `Round` and `LawParams` messages that both links share, and the checks of received ones.

A value out of range raises InvalidRequest, which names the field and its limit. Called by `codec`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from specdec.contract.constraint import CONSTRAINT_ID_BYTES, Constraint, ConstraintKind
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import InvalidRequest
from specdec.contract.tenant import DEFAULT_TENANT, check_tenant, session_on_replica
from specdec.contract.types import DrawRule, SamplingFilters, SessionPosition
from specdec.core.chain import HASH_BYTES
from specdec.core.limits import check_filters, check_token_ids
from specdec.observability.logging import bound_request_id
from specdec.rpc.arrays import token_ids
from specdec.v1 import common_pb2

_MAX_SESSION_ID_BYTES = 256

#: Limit of cached requests and of cached filters, of which the oldest leave; it exceeds the number that run at once.
_MAX_CACHED = 4096
#: Longest `LawParams` that is cached. Long lists of biases are rare.
_MAX_CACHED_FILTERS_BYTES = 512

#: Filters whose number 1, which is off, is 0 on the wire.
_OFF_AT_1 = ("top_p", "repetition_penalty")

_encoded_requests: dict[tuple[str, str, str, int, int, int, int, int, int, int], tuple[SamplingFilters, bytes]] = {}
"""Encoded fields that all rounds of a request share, by these fields and the `id` of its filters. The filters are kept
beside them, so that their `id` is not used again."""

_decoded_filters: dict[tuple[bytes, int], SamplingFilters] = {}
"""Decoded filters by their bytes and the vocabulary size that they were checked against."""


def encode_round(round_: SessionPosition, message: common_pb2.Round) -> None:
    """Fill an empty message."""
    message.MergeFromString(_encode_request(round_))
    message.round_id = round_.round_id
    message.start = round_.start
    message.prefix_hash = round_.prefix_hash
    message.token_ids.extend(round_.token_ids.tolist())
    if round_.is_timed:
        message.timed = True
    if round_.constraint is not None:
        message.constraint.CopyFrom(encode_constraint(round_.constraint))


def encode_constraint(constraint: Constraint) -> common_pb2.Constraint:
    """Return the message of a constraint."""
    kind: Any = int(constraint.kind)
    return common_pb2.Constraint(kind=kind, text=constraint.text, is_lenient=constraint.is_lenient)


def decode_constraint(message: common_pb2.Constraint, field: str) -> Constraint:
    """Return the constraint of a message. Raises InvalidRequest for a kind that this version does not know."""
    kinds = ", ".join(f"{kind.name} ({kind})" for kind in ConstraintKind)
    require(int(message.kind) in tuple(ConstraintKind), f"{field}.kind", f"must be one of {kinds}, not {message.kind}")
    return Constraint(ConstraintKind(message.kind), message.text, message.is_lenient)


def _encode_request(round_: SessionPosition) -> bytes:
    """Return the encoded fields that are the same in all rounds of a request; they are encoded once."""
    filters, x_request_id = round_.filters, bound_request_id()
    key = (
        x_request_id,
        round_.tenant,
        round_.session_id,
        round_.epoch,
        round_.seed,
        round_.turn,
        round_.output_start,
        int(round_.draw_rule),
        round_.max_session_tokens,
        id(filters),
    )
    known = _encoded_requests.get(key)
    if known is None:
        if len(_encoded_requests) >= _MAX_CACHED:
            del _encoded_requests[next(iter(_encoded_requests))]
        message = common_pb2.Round(
            session_id=round_.session_id,
            epoch=round_.epoch,
            law=_filters_message(filters),
            seed=round_.seed,
            turn=round_.turn,
            output_start=round_.output_start,
            draw_rule=int(round_.draw_rule),  # type: ignore[arg-type]
            tenant=tenant_on_wire(round_.tenant),
            max_session_tokens=round_.max_session_tokens,
            x_request_id=x_request_id,
        )
        known = _encoded_requests[key] = filters, message.SerializeToString()
    return known[1]


def _filters_message(filters: SamplingFilters) -> common_pb2.LawParams:
    values: dict[str, Any] = {field.name: getattr(filters, field.name) for field in fields(SamplingFilters)}
    for name in _OFF_AT_1:
        values[name] = 0.0 if values[name] == 1.0 else values[name]
    return common_pb2.LawParams(**values)


def tenant_on_wire(tenant: str) -> str:
    """Return the tenant as messages state it: "" for the default tenant."""
    return "" if tenant == DEFAULT_TENANT else tenant


def tenant_of(tenant_on_wire: str, *, field: str) -> str:
    """Return the tenant that a message states. Raises InvalidRequest."""
    return check_tenant(tenant_on_wire or DEFAULT_TENANT, field=field)


def decode_round(message: common_pb2.Round, limits: EngineInfo) -> SessionPosition:
    """Read a round and check it against the replica's vocabulary.

    Raises:
        InvalidRequest: naming the field and its limit.
    """
    tenant = tenant_of(message.tenant, field="round.tenant")
    session_id_bytes = len(message.session_id.encode())
    require(
        0 < session_id_bytes <= _MAX_SESSION_ID_BYTES,
        "round.session_id",
        f"must be 1 to {_MAX_SESSION_ID_BYTES} bytes, not {session_id_bytes}",
    )
    # An empty prefix has an empty hash.
    require(
        len(message.prefix_hash) == HASH_BYTES or (message.start == 0 and not message.prefix_hash),
        "round.prefix_hash",
        f"must be {HASH_BYTES} bytes, not {len(message.prefix_hash)}",
    )
    committed = token_ids(message.token_ids)
    require(len(committed) > 0, "round.token_ids", "must hold at least one token")
    check_token_ids(committed, limits.vocabulary_size, "round.token_ids")
    committed_len = message.start + len(committed)
    require(
        message.output_start <= committed_len,
        "round.output_start",
        f"is {message.output_start}, beyond the {committed_len} committed tokens",
    )
    require(
        int(message.draw_rule) in (DrawRule.DISTRIBUTION, DrawRule.COUPLED), "round.draw_rule", "must be LAW or COUPLED"
    )
    return SessionPosition(
        session_id=session_on_replica(tenant, message.session_id, field="round.session_id"),
        epoch=message.epoch,
        round_id=message.round_id,
        start=message.start,
        prefix_hash=message.prefix_hash,
        token_ids=committed,
        filters=_decode_filters(message.law, limits),
        seed=message.seed,
        turn=message.turn,
        output_start=message.output_start,
        draw_rule=DrawRule(message.draw_rule),
        tenant=tenant,
        is_timed=message.timed,
        max_session_tokens=message.max_session_tokens,
        constraint=decode_constraint(message.constraint, "round.constraint")
        if message.HasField("constraint")
        else None,
    )


def _decode_filters(message: common_pb2.LawParams, limits: EngineInfo) -> SamplingFilters:
    """Return checked filters. All rounds of a request carry the same ones, so they are read and checked once."""
    key = message.SerializeToString(), limits.vocabulary_size
    filters = _decoded_filters.get(key)
    if filters is None:
        filters = _read_filters(message, limits)
        if len(key[0]) <= _MAX_CACHED_FILTERS_BYTES:
            if len(_decoded_filters) >= _MAX_CACHED:
                del _decoded_filters[next(iter(_decoded_filters))]
            _decoded_filters[key] = filters
    return filters


def _read_filters(message: common_pb2.LawParams, limits: EngineInfo) -> SamplingFilters:
    # Counted before they are read.
    for name in ("logit_bias", "end_token_ids"):
        count, most = len(getattr(message, name)), limits.vocabulary_size
        require(count <= most, f"round.law.{name}", f"holds {count} entries, the vocabulary {most} tokens")
    values: dict[str, Any] = {field.name: getattr(message, field.name) for field in fields(SamplingFilters)}
    for name in _OFF_AT_1:
        values[name] = values[name] or 1.0
    values |= {"logit_bias": dict(message.logit_bias), "end_token_ids": tuple(message.end_token_ids)}
    require(
        len(message.constraint_id) in (0, CONSTRAINT_ID_BYTES),
        "round.law.constraint_id",
        f"must be {CONSTRAINT_ID_BYTES} bytes, not {len(message.constraint_id)}",
    )
    filters = SamplingFilters(**values)
    check_filters(filters, limits.vocabulary_size)
    return filters


def require(holds: bool, field: str, message: str, *, reason: str = "") -> None:
    """Raise InvalidRequest with the field's name and a message unless a condition holds."""
    if not holds:
        raise InvalidRequest(f"{field}: {message}", field=field, reason=reason)


def require_context(num_tokens: int, limits: EngineInfo) -> None:
    """Raise InvalidRequest (CONTEXT_TOO_LONG) unless a number of tokens fits the replica's context."""
    require(
        num_tokens <= limits.max_context_tokens,
        "round.token_ids",
        f"{num_tokens} tokens exceed the context of {limits.max_context_tokens}",
        reason="CONTEXT_TOO_LONG",
    )
