"""The checks of a replica's answer that a round makes, beyond the shape that the link has checked already.

A replica that answers nonsense must not end a stream that another replica can serve, and must not put a token into the
log that no tokenizer knows. Its refusals are not the client's fault either. `draft_calls` and `target_calls` apply the
checks; `specdec.rpc.proposals` checks the shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.contract.errors import (
    ConstraintMiss,
    Internal,
    KvMiss,
    ResourceExhausted,
    SpecdecError,
    StaleEpoch,
    Unavailable,
)
from specdec.contract.types import LocalDraft, Proposal, Verification
from specdec.core.packed import pack_rows, pack_supports
from specdec.core.random import DrawKey
from specdec.core.sparse import check_drawn


def check_proposal(
    proposal: Proposal, *, gamma: int, with_supports: bool, vocabulary_size: int, key: DrawKey | None = None
) -> None:
    """Refuse a draft that contradicts itself or the request.

    Args:
        proposal: answer of the draft.
        gamma: number of draft tokens that were requested.
        with_supports: whether this round carries distributions.
        vocabulary_size: number of token ids of the target.
        key: draw key of the round; None: it is not checked that the tokens were drawn with it.

    Raises:
        Internal: the draft has too many tokens, the wrong number of supports, a token outside the vocabulary, or one
            that was not drawn from its support.
    """
    num_draft_tokens = len(proposal.draft_token_ids)
    if num_draft_tokens > gamma or len(proposal.supports) != (num_draft_tokens if with_supports else 0):
        raise Internal(
            f"the draft answered {num_draft_tokens} tokens and {len(proposal.supports)} supports to gamma {gamma}"
        )
    token_ids = proposal.draft_token_ids.tolist()
    if with_supports:
        # Each draft token is in its support, whose ids ascend: the last one is the largest.
        supports = pack_supports(token_ids, proposal.supports)
        if key is not None:
            check_drawn(supports, key)
        ids = supports.ids
        token_ids = [int(ids.token_ids[start - 1]) for start in ids.starts]
    _check_ids(token_ids, vocabulary_size, "the draft")


def check_verification(
    verification: Verification,
    address: str,
    *,
    vocabulary_size: int,
    local: LocalDraft | None = None,
    with_supports: bool = False,
    key: DrawKey | None = None,
) -> None:
    """Refuse a verification that contains a token outside the vocabulary, or a wrong draft of the target's own.

    Args:
        verification: answer of the target at `address`.
        address: names the replica in the error.
        vocabulary_size: number of token ids of the target.
        local: draft that the target was requested to make by itself; None for none.
        with_supports: whether that draft must carry distributions.
        key: as in `check_proposal`, for that draft.

    Raises:
        Internal: the verification is refused.
    """
    rows = verification.rows
    chosen = pack_rows(rows).tail_token_ids if rows else verification.choice_token_ids.tolist()
    top_ids = [int(row.top_token_ids.max(initial=0)) for row in verification.logit_rows]
    _check_ids([*chosen, *top_ids], vocabulary_size, f"target {address}")
    if local is not None and verification.drafted is not None:
        check_proposal(
            verification.drafted,
            gamma=local.gamma,
            with_supports=with_supports,
            vocabulary_size=vocabulary_size,
            key=key,
        )


def ends_the_request(error: SpecdecError) -> bool:
    """Return whether a target's error is about the request's constraint, so that every target would raise it."""
    return error.reason in ("CONSTRAINT_INVALID", "NO_LEGAL_TOKEN")


def lost_adapter(error: SpecdecError) -> bool:
    """Return whether a target's error says that its server does not have the session's adapter any more."""
    return error.reason == "MODEL_NOT_FOUND"


def target_fault(error: SpecdecError, address: str) -> SpecdecError:
    """Return what a target's error means for the round.

    The coordinator has checked the client's request before it calls a target. A target that refuses its request
    (INVALID_ARGUMENT, UNAUTHENTICATED, ...) therefore reports a fault of the coordinator, which the client cannot mend.

    Returns:
        `error` itself if a round knows how to handle it; Unavailable if the target has lost the session's adapter; else
        an Internal that names the target at `address`.
    """
    if lost_adapter(error):
        return Unavailable(f"target {address}: {error.message}")
    if isinstance(error, KvMiss | ConstraintMiss | StaleEpoch | Unavailable | ResourceExhausted | Internal):
        return error
    if ends_the_request(error):
        return error
    return Internal(f"target {address} refused a verification: {error.code} {error.message}")


def _check_ids(token_ids: Sequence[int], vocabulary_size: int, source: str) -> None:
    largest = max(token_ids, default=-1)
    if largest >= vocabulary_size:
        raise Internal(f"{source} answered token id {largest}, the vocabulary has {vocabulary_size}")
