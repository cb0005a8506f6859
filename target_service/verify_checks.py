"""Check verification requests before an engine sees them, whichever engine that is.

`specdec.engine.sessions.request_checks` checks what draft and target requests share. Called by the verifier and by
`target_service.backends.engine`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdec.contract.errors import InvalidRequest
from specdec.contract.types import VerifyRequest
from specdec.core.limits import check_token_ids
from specdec.engine.sessions.request_checks import check_round


@dataclass(frozen=True, slots=True)
class VerifyLimits:
    """Limits of a target replica."""

    vocabulary_size: int
    max_context_tokens: int
    max_gamma: int


def check_verify(request: VerifyRequest, limits: VerifyLimits) -> None:
    """Refuse a request that the replica could never run.

    Raises:
        InvalidRequest: a field is out of range; the message names the field and the limit.
    """
    check_round(request.position, limits.vocabulary_size)
    _check_draft(request, limits)
    num_tokens = request.position.committed_len + len(request.draft_token_ids)
    if num_tokens > limits.max_context_tokens:
        raise InvalidRequest(
            f"{num_tokens} tokens with the draft ones, the context is {limits.max_context_tokens}",
            reason="CONTEXT_TOO_LONG",
            field="round.token_ids",
        )
    _check_supports(request, limits.vocabulary_size)
    if request.num_logprobs is not None and not 0 <= request.num_logprobs <= limits.vocabulary_size:
        raise InvalidRequest(f"num_logprobs must be in 0..{limits.vocabulary_size}", field="num_logprobs")


def _check_draft(request: VerifyRequest, limits: VerifyLimits) -> None:
    check_token_ids(request.draft_token_ids, limits.vocabulary_size, "draft_token_ids")
    num_draft_tokens = len(request.draft_token_ids)
    if num_draft_tokens > limits.max_gamma:
        raise InvalidRequest(
            f"{num_draft_tokens} draft tokens, at most {limits.max_gamma} are verified", field="draft_token_ids"
        )
    local = request.local_draft
    if local is not None and (num_draft_tokens or local.gamma < 1):
        raise InvalidRequest(
            "local_draft takes a gamma of at least 1 and no draft tokens beside it", field="local_draft"
        )


def _check_supports(request: VerifyRequest, vocabulary_size: int) -> None:
    num_draft_tokens = len(request.draft_token_ids)
    num_supports = num_draft_tokens if request.position.carries_distributions else 0
    if len(request.support_ids) != num_supports:
        raise InvalidRequest(
            f"{len(request.support_ids)} supports for {num_draft_tokens} draft tokens, this round needs {num_supports}",
            field="supports",
        )
    for support_ids in request.support_ids:
        check_token_ids(support_ids, vocabulary_size, "supports")
        if np.any(support_ids[1:] <= support_ids[:-1]):
            raise InvalidRequest("the token ids of a support must ascend", field="supports")
