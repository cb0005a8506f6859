"""Draft replies: `Proposal` messages <-> `specdec.contract.types.Proposal`.

A draft servicer encodes a proposal here on its way into a frame (`frames`); the coordinator's link (`client`) decodes
it. A received reply is checked against its request; one that does not fit becomes Internal, because the replica broke
the protocol. The supports and weights of all replies of a frame are read as one array, and only draft positions (at
most max_gamma a session) are looped over.

Wire format: protos/specdec/v1/draft.proto. Numbers in `bytes` fields are little-endian.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from typing import Any, TypeVar

import numpy as np

from specdec.contract.errors import Internal
from specdec.contract.types import MAX_SUPPORT, Proposal, ProposeRequest, Support
from specdec.core.packed import PackedSupports, locate_drawn
from specdec.rpc.arrays import cut, decode_supports, encode_supports, gather, split, to_bytes, token_ids
from specdec.rpc.stages import decode_stages
from specdec.v1 import draft_pb2

AnswerT = TypeVar("AnswerT")

#: Largest lost mass that is accepted: a replica sums shares in float32.
_MOST_LOST = 1.001


def encode_proposal(proposal: Proposal, call_id: int) -> draft_pb2.Proposal:
    """Return one item of a ProposalFrame."""
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
    """Read a frame's replies and check each against its request; a malformed reply becomes an Internal of its own."""
    return each_alone("proposal", read_proposals, messages, requests)


def read_proposals(messages: Sequence[draft_pb2.Proposal], requests: Sequence[ProposeRequest]) -> list[Proposal]:
    """Return the proposals of a frame. Raises ValueError if one of them is malformed."""
    for message, request in zip(messages, requests, strict=True):
        if len(message.draft_token_ids) > request.gamma:
            raise ValueError(f"{len(message.draft_token_ids)} draft tokens for a gamma of {request.gamma}")
    drafted = [message.draft_token_ids[:] for message in messages]
    drawn = [
        token_ids_ if request.position.carries_distributions else []
        for token_ids_, request in zip(drafted, requests, strict=True)
    ]
    columns = list(zip(messages, drafted, _read_supports(messages, drawn), strict=True))
    for message, request in zip(messages, requests, strict=True):
        if len(message.lost_mass) not in (0, len(message.draft_token_ids)):
            raise ValueError("lost_mass does not hold one number per draft token")
        if not all(0.0 <= lost <= _MOST_LOST for lost in message.lost_mass):
            raise ValueError("a lost_mass outside 0..1")
        check_progress(message, request.position.committed_len)
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
    """Return, for each message, the distributions that its tokens in `drawn` were drawn from, one per token."""
    if not any(drawn) and not any(message.HasField("supports") or message.weights for message in messages):
        return [() for _ in messages]
    packed = decode_supports([message.supports for message in messages], [len(drawn_here) for drawn_here in drawn])
    for ids, message in zip(packed, messages, strict=True):
        ids.message = message.supports
    sizes = [size for ids in packed for size in ids.sizes]
    # With larger supports the integers of the acceptance rule could overflow.
    if max(sizes, default=0) > MAX_SUPPORT:
        raise ValueError(f"a support of more than {MAX_SUPPORT} entries")
    counts = [len(ids.token_ids) for ids in packed]
    weights = gather([message.weights for message in messages], counts, "<u2", "weights")
    if not weights.all():
        raise ValueError("a support entry of weight 0")
    if not sizes:
        return [() for _ in messages]
    flat = [token_id for drawn_here in drawn for token_id in drawn_here]
    starts = [0, *accumulate(sizes[:-1])]
    entries = locate_drawn(flat, np.concatenate([ids.token_ids for ids in packed]), starts, sizes)
    # Relative to the message's first row: minus the entries before the message, plus one for each earlier row of it.
    offsets = [
        index - start
        for start, drawn_here in zip([0, *accumulate(counts[:-1])], drawn, strict=True)
        for index in range(len(drawn_here))
    ]
    columns = zip(
        packed,
        split(weights, counts),
        split(entries + np.array(offsets), [len(ids) for ids in packed]),
        cut(weights[entries].tolist(), drawn),
        cut(np.add.reduceat(weights, starts, dtype=np.int64).tolist(), drawn),
        strict=True,
    )
    return [PackedSupports(*column) if len(column[0]) else () for column in columns]


def check_progress(message: Any, committed_len: int) -> None:
    """Refuse a reply whose counts or times no step can have.

    Args:
        message: a Proposal or a Verification.
        committed_len: number of committed tokens of the session.

    Raises:
        ValueError: `num_cached_tokens` or `forward_s` is out of range.
    """
    if message.num_cached_tokens > committed_len:
        raise ValueError(f"num_cached_tokens is {message.num_cached_tokens} of {committed_len} tokens")
    if not 0.0 <= message.forward_s < inf:  # NaN fails every comparison
        raise ValueError(f"forward_s is {message.forward_s}; it must be finite and at least 0")


def each_alone(
    noun: str,
    read: Callable[[Sequence[Any], Sequence[Any]], list[AnswerT]],
    messages: Sequence[Any],
    requests: Sequence[Any],
) -> list[AnswerT | Internal]:
    """Return what `read` makes of all messages; if it raises, read each message alone, so that only the bad ones
    fail."""
    try:
        return list(read(messages, requests))
    except (ValueError, Internal) as error:
        if len(messages) == 1:
            return [Internal(f"malformed {noun}: {error}")]
    pairs = zip(messages, requests, strict=True)
    return [answer for message, request in pairs for answer in each_alone(noun, read, [message], [request])]
