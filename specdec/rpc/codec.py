"""Requests of both links and replica descriptions: protobuf messages <-> the dataclasses of `specdec.contract.types`.

The coordinator's link (`client`) encodes a request here; the replica's `servicer` decodes it here and hands it on.
Received values are checked against the replica's limits, here alone: a step carries many sessions, and a request that
could make it fail must not reach the engine. InvalidRequest names the field. Replies are in `proposals` and
`verifications`.

Wire format: protos/specdec/v1/{common,draft,target}.proto. Numbers in `bytes` fields are little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

from specdec.contract.engine_api import WIRE_NAMES, EngineInfo
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import (
    MAX_SCORED_TOKENS,
    LocalDraft,
    ProposeRequest,
    RunLimit,
    Score,
    ScoreRequest,
    TokenIds,
    VerifyRequest,
)
from specdec.core.limits import check_token_ids
from specdec.rpc.arrays import ReceivedIds, decode_supports, encode_supports, from_bytes, to_bytes, token_ids
from specdec.rpc.rounds import decode_round, encode_round, require, require_context
from specdec.v1 import common_pb2, draft_pb2, target_pb2

_MAX_LOGPROBS = 1024


def encode_propose_request(request: ProposeRequest, call_id: int) -> draft_pb2.ProposeRequest:
    """Return one item of a ProposeFrame."""
    message = draft_pb2.ProposeRequest(call_id=call_id, gamma=request.gamma)
    encode_round(request.position, message.round)
    return message


def decode_propose_request(message: draft_pb2.ProposeRequest, limits: EngineInfo) -> ProposeRequest:
    """Read an item and check it against the replica's vocabulary and gamma. A draft ends at the context's end, so its
    length is not checked against the context.

    Raises:
        InvalidRequest: naming the field and its limit.
    """
    round_ = decode_round(message.round, limits)
    require(1 <= message.gamma <= limits.max_gamma, "gamma", f"must be 1 to {limits.max_gamma}, not {message.gamma}")
    return ProposeRequest(position=round_, gamma=message.gamma)


def encode_score_request(request: ScoreRequest) -> common_pb2.ScoreRequest:
    """Return the message of a Score call."""
    message = common_pb2.ScoreRequest(token_ids=request.token_ids.tolist(), local_pool=request.local_pool)
    encode_round(request.position, message.round)
    return message


def decode_score_request(message: common_pb2.ScoreRequest, limits: EngineInfo) -> ScoreRequest:
    """Read a Score call and check it against the replica's vocabulary; the engine checks its draft's context.

    Raises:
        InvalidRequest: naming the field and its limit.
    """
    num_scored = len(message.token_ids)
    require(num_scored <= MAX_SCORED_TOKENS, "token_ids", f"holds {num_scored}; the limit is {MAX_SCORED_TOKENS}")
    require(num_scored > 0, "token_ids", "must hold at least one token")
    require(not message.round.start, "round.start", "must be 0 where tokens are scored")
    scored = token_ids(message.token_ids)
    check_token_ids(scored, limits.vocabulary_size, "token_ids")
    return ScoreRequest(decode_round(message.round, limits), scored, message.local_pool)


def encode_score(score: Score) -> common_pb2.ScoreResponse:
    """Return the answer to a Score call."""
    return common_pb2.ScoreResponse(
        q=to_bytes([np.array(score.q)], "<f4"),
        forward_s=score.forward_s,
        step_s=score.step_s,
        round_lengths=score.round_lengths,
    )


def decode_score(message: common_pb2.ScoreResponse, num_scored: int) -> Score:
    """Return the score in an answer. Raises ValueError if it does not fit a request for `num_scored` tokens."""
    lengths = tuple(message.round_lengths)
    if lengths and (
        len(lengths) != num_scored or any(length > num_scored - start for start, length in enumerate(lengths))
    ):
        raise ValueError(f"round_lengths {list(lengths)} do not fit {num_scored} scored tokens")
    q = from_bytes(message.q, "<f4", sum(lengths) if lengths else num_scored, "q")
    if not (np.all((q >= 0.0) & (q <= 1.0)) and 0.0 <= message.step_s < inf and 0.0 <= message.forward_s < inf):
        raise ValueError("q is outside 0..1, or a time is negative or not finite")
    return Score(tuple(q.tolist()), message.forward_s, message.step_s, lengths)


def encode_verify_request(request: VerifyRequest, call_id: int) -> target_pb2.VerifyRequest:
    """Return one item of a VerifyFrame."""
    message = target_pb2.VerifyRequest(
        call_id=call_id, draft_token_ids=request.draft_token_ids.tolist(), num_logprobs=request.num_logprobs
    )
    encode_round(request.position, message.round)
    if request.support_ids:
        # Supports from a draft's reply are sent on in the message that they came in.
        received = request.support_ids.message if isinstance(request.support_ids, ReceivedIds) else None
        message.supports.CopyFrom(received or encode_supports(request.support_ids))
    if request.local_draft is not None:
        message.local_draft.pool, message.local_draft.gamma = request.local_draft.pool, request.local_draft.gamma
    if request.run is not None:
        message.run.until = request.run.until
        message.run.end_token_ids.extend(sorted(request.run.end_token_ids))
    return message


def decode_verify_request(message: target_pb2.VerifyRequest, limits: EngineInfo, *, model: str = "") -> VerifyRequest:
    """Read an item and check it against the replica's vocabulary, context and gamma; `model` is that of its stream.

    Raises:
        InvalidRequest: naming the field and its limit.
    """
    round_ = decode_round(message.round, limits)
    num_draft_tokens = len(message.draft_token_ids)
    require(
        num_draft_tokens <= limits.max_gamma,
        "draft_token_ids",
        f"holds {num_draft_tokens} tokens; the limit is {limits.max_gamma}",
    )
    draft_token_ids = token_ids(message.draft_token_ids)
    check_token_ids(draft_token_ids, limits.vocabulary_size, "draft_token_ids")
    require_context(round_.committed_len + num_draft_tokens, limits)
    support_ids: Sequence[TokenIds] = ()
    if round_.carries_distributions or message.HasField("supports"):
        try:
            (support_ids,) = decode_supports(
                [message.supports], [num_draft_tokens if round_.carries_distributions else 0]
            )
        except ValueError as error:
            raise InvalidRequest(f"supports: {error}", field="supports") from error
        for ids in support_ids:
            check_token_ids(ids[-1:], limits.vocabulary_size, "supports")  # ascending: the last is the largest
    num_logprobs = message.num_logprobs if message.HasField("num_logprobs") else None
    most = min(_MAX_LOGPROBS, limits.vocabulary_size)
    require((num_logprobs or 0) <= most, "num_logprobs", f"must be at most {most}, not {num_logprobs}")
    return VerifyRequest(
        round_,
        draft_token_ids,
        tuple(support_ids),
        num_logprobs,
        _decode_local(message),
        _decode_run(message, round_.committed_len),
        "" if model == limits.model_fingerprint else model,
    )


def _decode_run(message: target_pb2.VerifyRequest, committed_len: int) -> RunLimit | None:
    """Return the run that a request asks for. The engine cuts an `until` above the replica's limits."""
    if not message.HasField("run"):
        return None
    until = message.run.until
    require(until > committed_len, "run.until", f"must be above the committed length {committed_len}, not {until}")
    require(
        not message.draft_token_ids and not message.HasField("local_draft"),
        "run",
        "cannot be combined with draft_token_ids or local_draft",
    )
    return RunLimit(until, frozenset(message.run.end_token_ids))


def _decode_local(message: target_pb2.VerifyRequest) -> LocalDraft | None:
    """Return the local draft that a request asks for. The engine cuts a gamma above the replica's limit."""
    if not message.HasField("local_draft"):
        return None
    pool, gamma = message.local_draft.pool, message.local_draft.gamma
    require(gamma >= 1, "local_draft.gamma", "must be at least 1")
    require(not message.draft_token_ids, "local_draft", "cannot be combined with draft_token_ids")
    return LocalDraft(pool, gamma)


def encode_engine_info(engine_info: EngineInfo) -> common_pb2.EngineInfo:
    """Return the message, field by field."""
    return common_pb2.EngineInfo(
        **{wire_name: getattr(engine_info, name) for name, wire_name in _ENGINE_INFO_FIELDS.items()}
    )


def decode_engine_info(message: common_pb2.EngineInfo) -> EngineInfo:
    """Return the description that a message holds."""
    values: dict[str, Any] = {name: getattr(message, wire_name) for name, wire_name in _ENGINE_INFO_FIELDS.items()}
    return EngineInfo(**{**values, **{name: tuple(values[name]) for name in _LIST_FIELDS}})


_LIST_FIELDS = (
    "eos_token_ids",
    "local_drafts",
    "local_gammas",
    "unsupported_fields",
    "adapter_names",
    "adapter_fingerprints",
)
_ENGINE_INFO_FIELDS = {name: WIRE_NAMES.get(name, name) for name in EngineInfo.__dataclass_fields__}
