"""Target replies: `Verification` messages <-> `specdec.contract.types.Verification`.

A target servicer encodes a verification here on its way into a frame (`frames`); the coordinator's link (`client`)
decodes it. A received reply is checked against its request; one that does not fit becomes Internal, because the replica
broke the protocol. The weights of all replies of a frame are read as one array.

Wire format: protos/specdec/v1/target.proto. Numbers in `bytes` fields are little-endian.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from specdec.contract.errors import Internal
from specdec.contract.types import (
    WEIGHT_TOTAL,
    DistributionRow,
    LogitRow,
    Proposal,
    ProposeRequest,
    Verification,
    VerifyRequest,
)
from specdec.core.packed import NO_IDS, PackedIds, PackedRows, pack_supports
from specdec.rpc.arrays import cut, encode_supports, from_bytes, gather, split, to_bytes, token_ids
from specdec.rpc.proposals import check_progress, each_alone, read_proposals
from specdec.rpc.stages import decode_stages
from specdec.v1 import draft_pb2, target_pb2

#: Rounding by which a logit may exceed its row's logsumexp.
_LOGIT_SLACK = 0.01

_NO_PROBABILITIES = np.zeros(0)
_NO_PROBABILITIES.setflags(write=False)
_NO_WEIGHTS = np.zeros(0, dtype=np.uint32)


def encode_verification(verification: Verification, call_id: int) -> target_pb2.Verification:
    """Return one item of a VerificationFrame."""
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


def encode_steps(steps: Sequence[tuple[int, Verification]]) -> target_pb2.RunStep:
    """Return the steps of runs, each with its call's id, in columns, without logprobs and times of stages."""
    newest = steps[-1][1]
    message = target_pb2.RunStep(forward_s=newest.forward_s, step_tokens=newest.step_tokens)
    probabilities = []
    for call_id, verification in steps:
        message.call_ids.append(call_id)
        message.token_ids.append(verification.decided_token_id)
        message.positions.append(verification.kv_len)
        rows = verification.rows
        probabilities.append(rows[0].tail_probability if rows else float(verification.choice_probabilities[0]))
    if any(probability != 1.0 for probability in probabilities):
        message.probabilities.extend(probabilities)
    return message


def read_steps(message: target_pb2.RunStep) -> list[tuple[int, int, int, float]]:
    """Return call id, token id, position and probability of each step.

    Raises:
        DecodeError: the columns differ in length, or a probability or a time is out of range.
    """
    num_steps = len(message.call_ids)
    probabilities = message.probabilities or [1.0] * num_steps
    if not (num_steps == len(message.token_ids) == len(message.positions) == len(probabilities)):
        raise DecodeError("the columns of a run step differ in length")
    if not all(0.0 <= probability <= 1.0 for probability in probabilities) or not 0.0 <= message.forward_s < math.inf:
        raise DecodeError("a probability outside 0..1, or a time that is not finite, in a run step")
    return list(zip(message.call_ids, message.token_ids, message.positions, probabilities, strict=True))


def verification_of_step(
    request: VerifyRequest, token_id: int, position: int, probability: float, message: target_pb2.RunStep
) -> Verification:
    """Return the verification of one step of a run, as a call for that step alone would have been answered."""
    choices, probabilities = NO_IDS, _NO_PROBABILITIES
    rows: Sequence[DistributionRow] = ()
    if request.position.carries_distributions:
        rows = PackedRows(_NO_WEIGHTS, (), (token_id,), (probability,))
    else:
        choices, probabilities = np.array([token_id], dtype=np.uint32), np.array([probability])
    return Verification(
        choice_token_ids=choices,
        choice_probabilities=probabilities,
        rows=rows,
        logit_rows=(),
        kv_len=position,
        num_cached_tokens=position - 1,
        forward_s=message.forward_s,
        step_tokens=message.step_tokens,
    )


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
    """Read a frame's replies and check each against its request; a malformed reply becomes an Internal of its own."""
    return each_alone("verification", _read_verifications, messages, requests)


def _read_verifications(
    messages: Sequence[target_pb2.Verification], requests: Sequence[VerifyRequest]
) -> list[Verification]:
    """Return the verifications of a frame. Raises ValueError if one of them is malformed."""
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
    """Return the target's own draft, or None if it drafted nothing. Raises ValueError if it is malformed."""
    local, drafted = request.local_draft, message.drafted
    if local is None or not len(drafted.draft_token_ids):
        return None
    (proposal,) = read_proposals(
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
    """Return the request as if it had contained the target's own draft."""
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
    # The caller checks how far a run has come; its request only says where it began.
    check_progress(message, request.position.committed_len if request.run is None else message.kv_len)
    num_positions = len(request.draft_token_ids) + 1
    choices, probabilities = NO_IDS, _NO_PROBABILITIES
    if rows is not None:
        _expect(not len(message.choice_token_ids), "choice_token_ids in a distribution round")
    else:
        choices = token_ids(message.choice_token_ids)
        _expect(len(choices) == num_positions, f"{len(choices)} choices for {num_positions} positions")
        probabilities = _choice_probabilities(message.tail_probabilities, num_positions)
    logit_rows: tuple[LogitRow, ...] = ()
    if request.num_logprobs is not None:
        _expect(message.HasField("logits"), "no logits although logprobs were requested")
        sizes = [*(len(ids) for ids in request.support_ids), 0] if rows else [0] * num_positions
        tails = [token_id >= 0 for token_id in rows.tail_token_ids] if rows else [True] * num_positions
        logit_rows = _decode_logits(message.logits, sizes, tails, request.num_logprobs)
        _check_logits(logit_rows, rows)
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


def _read_rows(messages: Sequence[target_pb2.Verification], sizes_of: Sequence[list[int]]) -> list[PackedRows]:
    counts = [sum(sizes) for sizes in sizes_of]
    weights = gather([message.weights for message in messages], counts, "<u4", "weights")
    sizes = [size for own in sizes_of for size in own]
    tail_masses: list[int] = []
    if sizes:
        ends = list(accumulate(sizes))
        totals = np.add.reduceat(weights, [0, *ends[:-1]], dtype=np.int64)
        if (totals != WEIGHT_TOTAL).any():
            raise ValueError(f"the weights of a position do not sum to 2^31: {totals.tolist()}")
        tail_masses = weights[[end - 1 for end in ends]].tolist()
    columns = zip(messages, split(weights, counts), sizes_of, cut(tail_masses, sizes_of), strict=True)
    return [PackedRows(own, own_sizes, *_tails(message, own_tails)) for message, own, own_sizes, own_tails in columns]


def _tails(message: target_pb2.Verification, tail_masses: Sequence[int]) -> tuple[list[int], list[float]]:
    """Return the tail token and its probability of every position, the bonus position last.

    `tail_masses` holds the weight outside the support of each position but the last.
    """
    num_tails = sum(mass > 0 for mass in tail_masses) + 1
    if not len(message.tail_token_ids) == len(message.tail_probabilities) == num_tails:
        raise ValueError(f"{len(message.tail_token_ids)} tail tokens for {num_tails} positions with a tail mass")
    tail_ids, probabilities = message.tail_token_ids[:], message.tail_probabilities[:]
    _expect_probabilities(probabilities)
    if num_tails <= len(tail_masses):
        for index, mass in enumerate(tail_masses):
            if not mass:
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
    _expect(len(top_ids) == sum(num_top), f"{len(top_ids)} top tokens, {num_logprobs} per position were requested")
    top_logits = split(from_bytes(message.top_logits, "<f4", sum(num_top), "top_logits"), num_top)
    return tuple(
        LogitRow(logits, next(tail) if has_tail else 0.0, logsumexp, ids, top)
        for logits, has_tail, logsumexp, ids, top in zip(
            support, tails, logsumexps, split(top_ids, num_top), top_logits, strict=True
        )
    )


def _check_logits(logit_rows: Sequence[LogitRow], rows: PackedRows | None) -> None:
    """Refuse logits that give a logprob above 0, or an emitted token none. A token that p gives nothing may have -inf.

    Raises:
        ValueError: a logit or a logsumexp is NaN, infinite, or above what its row allows.
    """
    for index, row in enumerate(logit_rows):
        has_tail = rows is None or rows.tail_token_ids[index] >= 0
        is_emitted = slice(0) if rows is None else rows.row_weights(index)[:-1] > 0
        emitted = [row.support_logits[is_emitted], [row.tail_logit] if has_tail else ()]
        most = row.logsumexp + _LOGIT_SLACK
        if not (
            math.isfinite(row.logsumexp)
            and np.isfinite(np.concatenate(emitted)).all()
            # NaN fails every comparison.
            and (np.concatenate([*emitted, row.support_logits, row.top_logits]) <= most).all()
        ):
            raise ValueError(f"a logit of position {index} is not finite, or above the logsumexp {row.logsumexp}")


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
