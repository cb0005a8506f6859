"""Replies of both links: protobuf messages <-> the dataclasses of `specdec.types`.

An answer is encoded here on its way from a `servicer` into a frame (`frames`), and decoded here for the coordinator's
link (`client`). What arrives is checked against the request it answers (Internal: the replica broke the protocol). The
supports and weights of all replies of a frame are read as one array; only draft positions (at most max_gamma a session)
are looped over. Not here: requests (`codec`), streams (`link_stream`, `frames`), statuses (`status`).

Wire format: protos/specdec/v1/{draft,target}.proto. Numbers in `bytes` fields are little-endian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from specdec.core.packed import NO_IDS, PackedIds, PackedRows, PackedSupports, locate_drawn, pack_supports
from specdec.errors import Internal
from specdec.rpc.arrays import decode_supports, encode_supports, from_bytes, split, to_bytes, token_ids
from specdec.rpc.stages import decode_stages
from specdec.types import (
    MAX_SUPPORT,
    WEIGHT_TOTAL,
    LogitRow,
    Proposal,
    ProposeRequest,
    Support,
    Verification,
    VerifyRequest,
)
from specdec.v1 import draft_pb2, target_pb2

_NO_PROBABILITIES = np.zeros(0)
_NO_PROBABILITIES.setflags(write=False)

AnswerT = TypeVar("AnswerT")


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


def decode_proposals(
    messages: Sequence[draft_pb2.Proposal], requests: Sequence[ProposeRequest]
) -> list[Proposal | Internal]:
    """Reads a frame's replies and checks each against its request; one that broke the protocol is its own Internal."""
    return _each_alone("proposal", _read_proposals, messages, requests)


def _read_proposals(messages: Sequence[draft_pb2.Proposal], requests: Sequence[ProposeRequest]) -> list[Proposal]:
    """Raises ValueError when any of them is malformed."""
    for message, request in zip(messages, requests, strict=True):
        if len(message.draft_token_ids) > request.gamma:
            raise ValueError(f"{len(message.draft_token_ids)} draft tokens for a gamma of {request.gamma}")
    drafted = [message.draft_token_ids[:] for message in messages]
    drawn = [
        token_ids_ if request.position.carries_distributions else []
        for token_ids_, request in zip(drafted, requests, strict=True)
    ]
    columns = list(zip(messages, drafted, _read_supports(messages, drawn), strict=True))
    if any(len(message.lost_mass) not in (0, len(token_ids_)) for message, token_ids_, _ in columns):
        raise ValueError("lost_mass is not one number a draft token")
    return [
        Proposal(
            draft_token_ids=token_ids(token_ids_),
            supports=supports,
            lost_mass=tuple(message.lost_mass[:]),
            kv_len=message.kv_len,
            num_cached_tokens=message.num_cached_tokens,
            forward_s=message.forward_s,
            stages=decode_stages(message.stages) if message.HasField("stages") else None,
        )
        for message, token_ids_, supports in columns
    ]


def _read_supports(messages: Sequence[draft_pb2.Proposal], drawn: Sequence[list[int]]) -> list[Sequence[Support]]:
    """The distributions that the tokens `drawn` of each message were drawn from, one each."""
    if not any(drawn) and not any(message.HasField("supports") or message.weights for message in messages):
        return [() for _ in messages]
    packed = decode_supports([message.supports for message in messages], [len(drawn_here) for drawn_here in drawn])
    for ids, message in zip(packed, messages, strict=True):
        ids.message = message.supports
    sizes = [size for ids in packed for size in ids.sizes]
    # Beyond it the integers of the acceptance rule could overflow.
    if max(sizes, default=0) > MAX_SUPPORT:
        raise ValueError(f"a support of more than {MAX_SUPPORT} entries")
    counts = [len(ids.token_ids) for ids in packed]
    weights = _gather([message.weights for message in messages], counts, "<u2", "weights")
    if not weights.all():
        raise ValueError("a support entry of weight 0")
    if not sizes:
        return [() for _ in messages]
    flat = [token_id for drawn_here in drawn for token_id in drawn_here]
    starts = [0, *accumulate(sizes[:-1])]
    entries = locate_drawn(flat, np.concatenate([ids.token_ids for ids in packed]), starts, sizes)
    # Counted from the message's own first row: less what came before, plus one for each row before in the message.
    offsets = [
        index - start
        for start, drawn_here in zip([0, *accumulate(counts[:-1])], drawn, strict=True)
        for index in range(len(drawn_here))
    ]
    columns = zip(
        packed,
        split(weights, counts),
        split(entries + np.array(offsets), [len(ids) for ids in packed]),
        _cut(weights[entries].tolist(), drawn),
        _cut(np.add.reduceat(weights, starts, dtype=np.int64).tolist(), drawn),
        strict=True,
    )
    return [PackedSupports(*column) if len(column[0]) else () for column in columns]


def encode_verification(verification: Verification, call_id: int) -> target_pb2.Verification:
    """One item of a VerificationFrame."""
    message = target_pb2.Verification(
        call_id=call_id,
        kv_len=verification.kv_len,
        num_cached_tokens=verification.num_cached_tokens,
        forward_s=verification.forward_s,
        step_tokens=verification.step_tokens,
        num_others=verification.num_concurrent,
        num_other_rows=verification.num_other_rows,
    )
    if verification.drafted is not None:
        message.drafted.CopyFrom(_encode_drafted(verification.drafted))
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


def _encode_drafted(drafted: Proposal) -> target_pb2.Drafted:
    message = target_pb2.Drafted(
        draft_token_ids=drafted.draft_token_ids.tolist(), lost_mass=drafted.lost_mass, forward_s=drafted.forward_s
    )
    if drafted.supports:
        message.supports.CopyFrom(encode_supports([support.token_ids for support in drafted.supports]))
        message.weights = to_bytes([support.weights for support in drafted.supports], "<u2")
    return message


def decode_verifications(
    messages: Sequence[target_pb2.Verification], requests: Sequence[VerifyRequest]
) -> list[Verification | Internal]:
    """As `decode_proposals`."""
    return _each_alone("verification", _read_verifications, messages, requests)


def _read_verifications(
    messages: Sequence[target_pb2.Verification], requests: Sequence[VerifyRequest]
) -> list[Verification]:
    """Raises ValueError when any of them is malformed."""
    drafted: list[Proposal | None] = [None] * len(messages)
    if any(request.local_draft is not None for request in requests):
        drafted = [_read_drafted(message, request) for message, request in zip(messages, requests, strict=True)]
        requests = [_verified(request, proposal) for request, proposal in zip(requests, drafted, strict=True)]
    with_supports = [request.position.carries_distributions for request in requests]
    rows = iter(
        _read_rows(
            [message for message, is_finite in zip(messages, with_supports, strict=True) if is_finite],
            [_row_sizes(request) for request, is_finite in zip(requests, with_supports, strict=True) if is_finite],
        )
    )
    return [
        _read_verification(message, request, next(rows) if is_finite else None, proposal)
        for message, request, is_finite, proposal in zip(messages, requests, with_supports, drafted, strict=True)
    ]


def _read_drafted(message: target_pb2.Verification, request: VerifyRequest) -> Proposal | None:
    """What a target drafted by itself; None where that is nothing. Raises ValueError when it is malformed."""
    local, drafted = request.local_draft, message.drafted
    if local is None or not len(drafted.draft_token_ids):
        return None
    (proposal,) = _read_proposals(
        [
            draft_pb2.Proposal(
                draft_token_ids=drafted.draft_token_ids,
                supports=drafted.supports if drafted.HasField("supports") else None,
                weights=drafted.weights,
                lost_mass=drafted.lost_mass,
                kv_len=message.kv_len,
                num_cached_tokens=message.num_cached_tokens,
                forward_s=drafted.forward_s,
            )
        ],
        [ProposeRequest(request.position, local.gamma)],
    )
    return proposal


def _verified(request: VerifyRequest, drafted: Proposal | None) -> VerifyRequest:
    """The request as if it had brought what was drafted."""
    if drafted is None:
        return request
    support_ids = pack_supports(drafted.draft_token_ids.tolist(), drafted.supports).ids
    return VerifyRequest(request.position, drafted.draft_token_ids, support_ids, request.num_logprobs)


def _row_sizes(request: VerifyRequest) -> list[int]:
    ids = request.support_ids
    return [size + 1 for size in (ids.sizes if isinstance(ids, PackedIds) else map(len, ids))]


def _read_verification(
    message: target_pb2.Verification, request: VerifyRequest, rows: PackedRows | None, drafted: Proposal | None
) -> Verification:
    num_positions = len(request.draft_token_ids) + 1
    choices, probabilities = NO_IDS, _NO_PROBABILITIES
    if rows is not None:
        _expect(not len(message.choice_token_ids), "choice_token_ids in a law round")
    else:
        choices = token_ids(message.choice_token_ids)
        _expect(len(choices) == num_positions, f"{len(choices)} choices for {num_positions} positions")
        probabilities = _choice_probabilities(message.tail_probabilities, num_positions)
    logit_rows: tuple[LogitRow, ...] = ()
    if request.num_logprobs is not None:
        _expect(message.HasField("logits"), "no logits though logprobs were asked for")
        sizes = [*(len(ids) for ids in request.support_ids), 0] if rows else [0] * num_positions
        tails = [token_id >= 0 for token_id in rows.tail_token_ids] if rows else [True] * num_positions
        logit_rows = _decode_logits(message.logits, sizes, tails, request.num_logprobs)
    return Verification(
        choice_token_ids=choices,
        choice_probabilities=probabilities,
        rows=() if rows is None else rows,
        logit_rows=logit_rows,
        kv_len=message.kv_len,
        num_cached_tokens=message.num_cached_tokens,
        forward_s=message.forward_s,
        step_tokens=message.step_tokens,
        num_concurrent=message.num_others,
        num_other_rows=message.num_other_rows,
        drafted=drafted,
        stages=decode_stages(message.stages) if message.HasField("stages") else None,
    )


# ---- distribution rows and logits
# -------------------------------------------------------------------------------------------


def _read_rows(messages: Sequence[target_pb2.Verification], sizes_of: Sequence[list[int]]) -> list[PackedRows]:
    counts = [sum(sizes) for sizes in sizes_of]
    weights = _gather([message.weights for message in messages], counts, "<u4", "weights")
    sizes = [size for own in sizes_of for size in own]
    rests: list[int] = []
    if sizes:
        ends = list(accumulate(sizes))
        totals = np.add.reduceat(weights, [0, *ends[:-1]], dtype=np.int64)
        if (totals != WEIGHT_TOTAL).any():
            raise ValueError(f"the weights of a position do not sum to 2^31: {totals.tolist()}")
        rests = weights[[end - 1 for end in ends]].tolist()
    columns = zip(messages, split(weights, counts), sizes_of, _cut(rests, sizes_of), strict=True)
    return [PackedRows(own, own_sizes, *_tails(message, own_rests)) for message, own, own_sizes, own_rests in columns]


def _tails(message: target_pb2.Verification, rests: Sequence[int]) -> tuple[list[int], list[float]]:
    """z and p(z) of every position, the bonus position's last."""
    num_tails = sum(rest > 0 for rest in rests) + 1
    if not len(message.tail_token_ids) == len(message.tail_probabilities) == num_tails:
        raise ValueError(f"{len(message.tail_token_ids)} tail tokens for {num_tails} positions with a rest")
    tail_ids, probabilities = message.tail_token_ids[:], message.tail_probabilities[:]
    _expect_probabilities(probabilities)
    if num_tails <= len(rests):
        for index, rest in enumerate(rests):
            if not rest:
                tail_ids.insert(index, -1)
                probabilities.insert(index, 0.0)
    return tail_ids, probabilities


def _choice_probabilities(values: Sequence[float], num_positions: int) -> NDArray[np.float64]:
    _expect(len(values) in (0, num_positions), f"{len(values)} probabilities for {num_positions} choices")
    _expect_probabilities(values)
    return np.array(values, dtype=np.float64) if len(values) else np.ones(num_positions)


def _expect_probabilities(values: Sequence[float]) -> None:
    _expect(all(0.0 <= value <= 1.0 for value in values), "a probability outside 0..1")


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


# ---- many messages at once -------------------------------------------------------------------------------------------


def _each_alone(
    noun: str,
    read: Callable[[Sequence[Any], Sequence[Any]], list[AnswerT]],
    messages: Sequence[Any],
    requests: Sequence[Any],
) -> list[AnswerT | Internal]:
    """What `read` makes of all messages; when it refuses, of each by itself, so that the others do not suffer."""
    try:
        return list(read(messages, requests))
    except (ValueError, Internal) as error:
        if len(messages) == 1:
            return [Internal(f"malformed {noun}: {error}")]
    pairs = zip(messages, requests, strict=True)
    return [answer for message, request in pairs for answer in _each_alone(noun, read, [message], [request])]


def _gather(parts: Sequence[bytes], counts: Sequence[int], dtype: str, name: str) -> NDArray[Any]:
    """One array of all parts, each of which must hold its count of numbers."""
    width = np.dtype(dtype).itemsize
    for part, count in zip(parts, counts, strict=True):
        if len(part) != count * width:
            raise ValueError(f"{name} has {len(part)} bytes where {count * width} are expected")
    return np.frombuffer(b"".join(parts), dtype=dtype)


def _cut(values: list[Any], like: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Cuts a list into as many items each as those of `like` have."""
    parts, start = [], 0
    for part in like:
        parts.append(values[start : start + len(part)])
        start += len(part)
    return parts


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
