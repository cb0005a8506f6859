"""Check requests before the engine sees them, and compute the digest of a request.

A step carries many sessions, so a request that could make it fail is refused here, alone, before anything is stored or
reserved. Afterwards a request goes, as a `Call`, to the device thread (`specdec.engine.loop.device_loop`). The services
check what only one of them knows (gamma, supports). Called by the proposer and the verifier.
"""

from __future__ import annotations

import hashlib

import numpy as np

from specdec.contract.errors import InvalidRequest
from specdec.contract.types import MAX_SCORED_TOKENS, ProposeRequest, ScoreRequest, SessionPosition, VerifyRequest
from specdec.core.chain import HASH_BYTES
from specdec.core.limits import check_filters, check_token_ids

_DIGEST_BYTES = 16


def check_round(request: SessionPosition, vocabulary_size: int) -> None:
    """Refuse a round that no replica of this vocabulary could run.

    Raises:
        InvalidRequest: a field is out of range; the message names the field and the limit.
    """
    if not request.session_id:
        raise InvalidRequest("round.session_id is empty", field="round.session_id")
    if len(request.token_ids) == 0:
        raise InvalidRequest("round.token_ids is empty: a round needs a committed token", field="round.token_ids")
    if request.start < 0 or (request.start > 0 and len(request.prefix_hash) != HASH_BYTES):
        raise InvalidRequest(f"round.prefix_hash must be {HASH_BYTES} bytes", field="round.prefix_hash")
    if not 0 <= request.seed < 1 << 64:
        raise InvalidRequest("round.seed must be in [0, 2^64)", field="round.seed")
    if not 0 <= request.turn < 1 << 32:
        raise InvalidRequest("round.turn must be in [0, 2^32)", field="round.turn")
    check_token_ids(request.token_ids, vocabulary_size, "round.token_ids")
    check_filters(request.filters, vocabulary_size)


def check_scored(request: ScoreRequest, vocabulary_size: int) -> None:
    """Refuse a request that does not name a span of committed tokens.

    Raises:
        InvalidRequest: a field is out of range; the message names the field and the limit.
    """
    if request.position.start:
        raise InvalidRequest("round.start must be 0 where tokens are scored", field="round.start")
    if not 1 <= len(request.token_ids) <= MAX_SCORED_TOKENS:
        raise InvalidRequest(
            f"token_ids must hold 1 to {MAX_SCORED_TOKENS} tokens, got {len(request.token_ids)}", field="token_ids"
        )
    check_token_ids(request.token_ids, vocabulary_size, "token_ids")


def is_first_of_turn(position: SessionPosition) -> bool:
    """Return whether a call belongs to a turn that states its greatest length and has no output yet."""
    return position.max_session_tokens > 0 and position.committed_len <= position.output_start


def digest_of(request: ProposeRequest | VerifyRequest) -> bytes:
    """Return a digest of the whole request; two calls of one round with equal digests are the same request."""
    position = request.position
    filters = position.filters
    scalars: tuple[object, ...] = (
        position.start,
        position.prefix_hash,
        (filters.temperature, filters.top_p, filters.top_k, filters.min_p),
        (filters.repetition_penalty, filters.presence_penalty, filters.frequency_penalty),
        sorted(filters.logit_bias.items()),
        (filters.min_new_tokens, filters.end_token_ids),
        (position.seed, position.turn, position.output_start, int(position.draw_rule)),
        request.gamma if isinstance(request, ProposeRequest) else request.num_logprobs,
    )
    arrays = [position.token_ids]
    if isinstance(request, VerifyRequest):
        arrays += [request.draft_token_ids, *request.support_ids]
        if request.local_draft is not None:
            scalars = (*scalars, (request.local_draft.pool, request.local_draft.gamma))
    digest = hashlib.blake2b(repr(scalars).encode(), digest_size=_DIGEST_BYTES)
    for array in arrays:
        digest.update(len(array).to_bytes(4, "little"))
        digest.update(np.ascontiguousarray(array, dtype="<u4").tobytes())
    return digest.digest()
