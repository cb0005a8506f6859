"""What a replica's answer must be before a round believes it, beyond what the link has checked against the request.

A replica that answers nonsense must not end the stream where another can serve, nor put a token into the log that no
tokenizer knows; and its refusals are not the client's fault. Not here: what happens then, the answer's shape
(`specdec.rpc.proposals`, `specdec.rpc.verifications`). Called by `draft_calls` and `target_calls`, which have asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core.packed import pack_rows, pack_supports
from specdec.errors import Internal, KvMiss, ResourceExhausted, SpecdecError, StaleEpoch, Unavailable
from specdec.types import Proposal, Verification


def check_proposal(proposal: Proposal, *, gamma: int, with_supports: bool, vocabulary_size: int) -> None:
    """Refuses a draft that contradicts itself or the request.

    Args:
        proposal: the draft's answer.
        gamma: the most tokens that were asked for.
        with_supports: whether distributions travel in this round.
        vocabulary_size: the target's.

    Raises:
        Internal: it is no draft.
    """
    num_draft_tokens = len(proposal.draft_token_ids)
    if num_draft_tokens > gamma or len(proposal.supports) != (num_draft_tokens if with_supports else 0):
        raise Internal(
            f"the draft answered {num_draft_tokens} tokens and {len(proposal.supports)} supports to gamma {gamma}"
        )
    token_ids = proposal.draft_token_ids.tolist()
    if with_supports:
        # Each draft token is in its support, whose ids ascend: the last one is the largest.
        ids = pack_supports(token_ids, proposal.supports).ids
        token_ids = [int(ids.token_ids[start - 1]) for start in ids.starts]
    _check_ids(token_ids, vocabulary_size, "the draft")


def check_verification(verification: Verification, address: str, *, vocabulary_size: int) -> None:
    """Refuses an answer that chooses a token the vocabulary does not have.

    Raises:
        Internal: it does; the message names the replica at `address`.
    """
    rows = verification.rows
    chosen = pack_rows(rows).tail_token_ids if rows else verification.choice_token_ids.tolist()
    _check_ids(chosen, vocabulary_size, f"target {address}")


def target_fault(error: SpecdecError, address: str) -> SpecdecError:
    """What a target's error means for the round.

    The coordinator has checked the client's request before it asks anything, so a target that finds fault with what it
    was asked (INVALID_ARGUMENT, UNAUTHENTICATED, ...) finds fault with us: the client must not be told to mend it.

    Returns:
        `error` itself where a round knows what to do about it, else an Internal that names the target at `address`.
    """
    if isinstance(error, KvMiss | StaleEpoch | Unavailable | ResourceExhausted | Internal):
        return error
    return Internal(f"target {address} refused a verification: {error.code} {error.message}")


def _check_ids(token_ids: Sequence[int], vocabulary_size: int, who: str) -> None:
    largest = max(token_ids, default=-1)
    if largest >= vocabulary_size:
        raise Internal(f"{who} answered token id {largest}, the vocabulary has {vocabulary_size}")
