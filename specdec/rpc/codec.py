"""Protobuf messages <-> the dataclasses of `specdec.types`, for both links, with every check on what arrives.

Requests are checked against the replica's limits (InvalidRequest names the field); replies against the request they
answer (Internal: the replica broke the protocol). Supports and weights of a round are handled as whole arrays; only
draft positions (at most max_gamma) are looped over. Not here: streams (`client`, `frames`), statuses (`status`).

Wire format: protos/specdec/v1/{common,draft,target}.proto. Numbers in `bytes` fields are little-endian.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.core.limits import check_token_ids
from specdec.core.sparse import MAX_SUPPORT
from specdec.errors import Internal, InvalidRequest
from specdec.rpc.arrays import decode_supports, encode_supports, from_bytes, split, to_bytes, token_ids
from specdec.rpc.rounds import decode_round, encode_round, require, require_context, uses_supports
from specdec.types import (
    LAW_TOTAL,
    EngineInfo,
    LawRow,
    LogitRow,
    Proposal,
    ProposeRequest,
    Support,
    Verification,
    VerifyRequest,
)
from specdec.v1 import common_pb2, draft_pb2, target_pb2

_MAX_LOGPROBS = 1024

#: The bonus position's row: its support is empty, so all of it is the rest.
_BONUS_WEIGHTS = np.array([LAW_TOTAL], dtype=np.uint32)
_BONUS_WEIGHTS.setflags(write=False)


# ---- requests ----------------------------------------------------------------------------------------------------


def encode_propose_request(request: ProposeRequest, call_id: int) -> draft_pb2.ProposeRequest:
    """One item of a ProposeFrame."""
    return draft_pb2.ProposeRequest(call_id=call_id, round=encode_round(request.round), gamma=request.gamma)


def decode_propose_request(message: draft_pb2.ProposeRequest, limits: EngineInfo) -> ProposeRequest:
    """Reads and checks one item against the replica's vocabulary and gamma; where its context ends, the draft ends.

    Raises:
        InvalidRequest: naming the field and its limit.
    """
    round_ = decode_round(message.round, limits)
    require(1 <= message.gamma <= limits.max_gamma, "gamma", f"must be 1 to {limits.max_gamma}, not {message.gamma}")
    return ProposeRequest(round=round_, gamma=message.gamma)


def encode_verify_request(request: VerifyRequest, call_id: int) -> target_pb2.VerifyRequest:
    """One item of a VerifyFrame."""
    message = target_pb2.VerifyRequest(
        call_id=call_id,
        round=encode_round(request.round),
        draft_token_ids=request.draft_token_ids.tolist(),
        num_logprobs=request.num_logprobs,
    )
    if request.support_ids:
        message.supports.CopyFrom(encode_supports(request.support_ids))
    return message


def decode_verify_request(message: target_pb2.VerifyRequest, limits: EngineInfo) -> VerifyRequest:
    """Reads and checks one item against the replica's vocabulary, context and gamma.

    Raises:
        InvalidRequest: naming the field and its limit.
    """
    round_ = decode_round(message.round, limits)
    draft_token_ids = token_ids(message.draft_token_ids)
    num_draft_tokens = len(draft_token_ids)
    require(
        num_draft_tokens <= limits.max_gamma,
        "draft_token_ids",
        f"holds {num_draft_tokens} tokens; the limit is {limits.max_gamma}",
    )
    check_token_ids(draft_token_ids, limits.vocabulary_size, "draft_token_ids")
    require_context(round_.committed_len + num_draft_tokens, limits)
    try:
        support_ids = decode_supports(message.supports, num_draft_tokens if uses_supports(round_) else 0)
    except ValueError as error:
        raise InvalidRequest(f"supports: {error}", field="supports") from error
    for ids in support_ids:
        check_token_ids(ids[-1:], limits.vocabulary_size, "supports")  # ascending: the last is the largest
    num_logprobs = message.num_logprobs if message.HasField("num_logprobs") else None
    most = min(_MAX_LOGPROBS, limits.vocabulary_size)
    require((num_logprobs or 0) <= most, "num_logprobs", f"must be at most {most}, not {num_logprobs}")
    return VerifyRequest(round_, draft_token_ids, tuple(support_ids), num_logprobs)


# ---- replies -----------------------------------------------------------------------------------------------------


def encode_proposal(proposal: Proposal, call_id: int) -> draft_pb2.Proposal:
    """One item of a ProposalFrame."""
    message = draft_pb2.Proposal(
        call_id=call_id,
        draft_token_ids=proposal.draft_token_ids.tolist(),
        lost_mass=proposal.lost_mass,
        kv_len=proposal.kv_len,
        num_cached_tokens=proposal.num_cached_tokens,
        forward_s=proposal.forward_s,
    )
    if proposal.supports:
        message.supports.CopyFrom(encode_supports([support.token_ids for support in proposal.supports]))
        message.weights = to_bytes([support.weights for support in proposal.supports], "<u2")
    return message


def decode_proposal(message: draft_pb2.Proposal, request: ProposeRequest) -> Proposal:
    """Reads a reply and checks it against its request.

    Raises:
        Internal: the replica broke the protocol; the message says how.
    """
    try:
        return _read_proposal(message, request)
    except ValueError as error:
        raise Internal(f"malformed proposal: {error}") from error


def _read_proposal(message: draft_pb2.Proposal, request: ProposeRequest) -> Proposal:
    draft_token_ids = token_ids(message.draft_token_ids)
    num_draft_tokens = len(draft_token_ids)
    if num_draft_tokens > request.gamma:
        raise ValueError(f"{num_draft_tokens} draft tokens for a gamma of {request.gamma}")
    num_supports = num_draft_tokens if uses_supports(request.round) else 0
    supports = _read_supports(message, draft_token_ids.tolist()[:num_supports])
    if len(message.lost_mass) not in (0, num_draft_tokens):
        raise ValueError("lost_mass is not one number a draft token")
    return Proposal(
        draft_token_ids=draft_token_ids,
        supports=supports,
        lost_mass=tuple(message.lost_mass),
        kv_len=message.kv_len,
        num_cached_tokens=message.num_cached_tokens,
        forward_s=message.forward_s,
    )


def _read_supports(message: draft_pb2.Proposal, drawn: list[int]) -> tuple[Support, ...]:
    """The laws that the tokens `drawn` were drawn from, one each."""
    support_ids = decode_supports(message.supports, len(drawn))
    sizes = [len(ids) for ids in support_ids]
    # Beyond it the integers of the acceptance rule could overflow.
    if max(sizes, default=0) > MAX_SUPPORT:
        raise ValueError(f"a support of more than {MAX_SUPPORT} entries")
    weights = from_bytes(message.weights, "<u2", sum(sizes), "weights")
    if not weights.all():
        raise ValueError("a support entry of weight 0")
    for token_id, ids in zip(drawn, support_ids, strict=True):
        at = ids.searchsorted(token_id)
        if at == len(ids) or ids[at] != token_id:
            raise ValueError(f"draft token {token_id} is not in its own support")
    return tuple(map(Support, support_ids, split(weights, sizes)))


def encode_verification(verification: Verification, call_id: int) -> target_pb2.Verification:
    """One item of a VerificationFrame."""
    message = target_pb2.Verification(
        call_id=call_id,
        kv_len=verification.kv_len,
        num_cached_tokens=verification.num_cached_tokens,
        forward_s=verification.forward_s,
    )
    rows = verification.rows
    with_tail = [index for index, row in enumerate(rows) if row.weights[-1] > 0]
    if rows:
        message.weights = to_bytes([row.weights for row in rows[:-1]], "<u4")
        message.tail_token_ids.extend(rows[index].tail_token_id for index in with_tail)
        message.tail_probabilities.extend(rows[index].tail_probability for index in with_tail)
    else:
        message.choice_token_ids.extend(verification.choice_token_ids.tolist())
        if np.any(verification.choice_probabilities != 1.0):  # absent means 1 everywhere, as in greedy rounds
            message.tail_probabilities.extend(verification.choice_probabilities.tolist())
    if verification.logit_rows:
        tails = with_tail if rows else range(len(verification.logit_rows))
        message.logits.CopyFrom(_encode_logits(verification.logit_rows, tails))
    return message


def decode_verification(message: target_pb2.Verification, request: VerifyRequest) -> Verification:
    """Reads a reply and checks it against its request.

    Raises:
        Internal: the replica broke the protocol; the message says how.
    """
    try:
        return _read_verification(message, request)
    except ValueError as error:
        raise Internal(f"malformed verification: {error}") from error


def _read_verification(message: target_pb2.Verification, request: VerifyRequest) -> Verification:
    num_positions = len(request.draft_token_ids) + 1
    rows: tuple[LawRow, ...] = ()
    choices = token_ids(message.choice_token_ids)
    probabilities = np.zeros(0)
    if uses_supports(request.round):
        _expect(not len(choices), "choice_token_ids in a law round")
        rows = _decode_rows(message, request)
        tails = [row.tail_token_id >= 0 for row in rows]
    else:
        _expect(len(choices) == num_positions, f"{len(choices)} choices for {num_positions} positions")
        probabilities = _choice_probabilities(message.tail_probabilities, num_positions)
        tails = [True] * num_positions
    logit_rows: tuple[LogitRow, ...] = ()
    if request.num_logprobs is not None:
        _expect(message.HasField("logits"), "no logits though logprobs were asked for")
        sizes = [*(len(ids) for ids in request.support_ids), 0] if rows else [0] * num_positions
        logit_rows = _decode_logits(message.logits, sizes, tails, request.num_logprobs)
    return Verification(
        choice_token_ids=choices,
        choice_probabilities=probabilities,
        rows=rows,
        logit_rows=logit_rows,
        kv_len=message.kv_len,
        num_cached_tokens=message.num_cached_tokens,
        forward_s=message.forward_s,
    )


def encode_engine_info(engine_info: EngineInfo) -> common_pb2.EngineInfo:
    """Field by field: the names are the same on both sides."""
    return common_pb2.EngineInfo(**{name: getattr(engine_info, name) for name in _ENGINE_INFO_FIELDS})


def decode_engine_info(message: common_pb2.EngineInfo) -> EngineInfo:
    """The inverse of `encode_engine_info`."""
    values: dict[str, Any] = {name: getattr(message, name) for name in _ENGINE_INFO_FIELDS}
    return EngineInfo(**{**values, "eos_token_ids": tuple(message.eos_token_ids)})


_ENGINE_INFO_FIELDS = tuple(EngineInfo.__dataclass_fields__)


# ---- law rows and logits -------------------------------------------------------------------------------------------


def _decode_rows(message: target_pb2.Verification, request: VerifyRequest) -> tuple[LawRow, ...]:
    sizes = [len(ids) + 1 for ids in request.support_ids]
    weights = from_bytes(message.weights, "<u4", sum(sizes), "weights")
    rests: list[int] = []
    if sizes:
        ends = list(accumulate(sizes))
        totals = np.add.reduceat(weights, [0, *ends[:-1]], dtype=np.int64).tolist()
        if any(total != LAW_TOTAL for total in totals):
            raise ValueError(f"the weights of a position do not sum to 2^31: {totals}")
        rests = weights[[end - 1 for end in ends]].tolist()
    rests.append(LAW_TOTAL)
    tail_ids, tail_probabilities = message.tail_token_ids[:], message.tail_probabilities[:]
    num_tails = sum(rest > 0 for rest in rests)
    if not len(tail_ids) == len(tail_probabilities) == num_tails:
        raise ValueError(f"{len(tail_ids)} tail tokens for {num_tails} positions with a rest")
    tails = zip(tail_ids, tail_probabilities, strict=True)
    return tuple(
        LawRow(part, *(next(tails) if rest else (-1, 0.0)))
        for part, rest in zip([*split(weights, sizes), _BONUS_WEIGHTS], rests, strict=True)
    )


def _choice_probabilities(values: Sequence[float], num_positions: int) -> NDArray[np.float64]:
    _expect(len(values) in (0, num_positions), f"{len(values)} probabilities for {num_positions} choices")
    return np.array(values, dtype=np.float64) if len(values) else np.ones(num_positions)


def _encode_logits(rows: Sequence[LogitRow], tails: Iterable[int]) -> target_pb2.Logits:
    return target_pb2.Logits(
        support_logits=to_bytes([row.support_logits for row in rows], "<f4"),
        tail_logits=to_bytes([[rows[index].tail_logit for index in tails]], "<f4"),
        logsumexps=to_bytes([[row.logsumexp for row in rows]], "<f4"),
        top_token_ids=np.concatenate([row.top_token_ids for row in rows]).tolist(),
        top_logits=to_bytes([row.top_logits for row in rows], "<f4"),
    )


def _decode_logits(
    message: target_pb2.Logits, sizes: Sequence[int], tails: Sequence[bool], num_logprobs: int
) -> tuple[LogitRow, ...]:
    num_positions = len(sizes)
    support = split(from_bytes(message.support_logits, "<f4", sum(sizes), "support_logits"), sizes)
    tail = iter(from_bytes(message.tail_logits, "<f4", sum(tails), "tail_logits").tolist())
    logsumexps = from_bytes(message.logsumexps, "<f4", num_positions, "logsumexps").tolist()
    num_top = [num_logprobs] * num_positions
    top_ids = token_ids(message.top_token_ids)
    _expect(len(top_ids) == sum(num_top), f"{len(top_ids)} top tokens, {num_logprobs} a position were asked for")
    top_logits = split(from_bytes(message.top_logits, "<f4", sum(num_top), "top_logits"), num_top)
    return tuple(
        LogitRow(logits, next(tail) if has_tail else 0.0, logsumexp, ids, top)
        for logits, has_tail, logsumexp, ids, top in zip(
            support, tails, logsumexps, split(top_ids, num_top), top_logits, strict=True
        )
    )


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
