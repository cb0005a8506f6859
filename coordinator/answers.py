"""What a replica's answer must be before a round believes it, beyond what the link has checked against the request.

A replica that answers nonsense must not end the stream where another can serve, nor put a token into the log that no
tokenizer knows. Not here: what happens then (`round`), the answer's shape (`specdec.rpc.codec`). Called by `round`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from specdec.core.rejection import entry_of
from specdec.errors import Internal
from specdec.types import Proposal, TokenIds, Verification


def check_proposal(proposal: Proposal, *, gamma: int, with_supports: bool, vocabulary_size: int) -> None:
    """Refuses a draft that contradicts itself or the request.

    Args:
        proposal: the draft's answer.
        gamma: the most tokens that were asked for.
        with_supports: whether laws travel in this round.
        vocabulary_size: the target's.

    Raises:
        Internal: it is no draft.
    """
    num_draft_tokens = len(proposal.draft_token_ids)
    if num_draft_tokens > gamma or len(proposal.supports) != (num_draft_tokens if with_supports else 0):
        raise Internal(
            f"the draft answered {num_draft_tokens} tokens and {len(proposal.supports)} supports to gamma {gamma}"
        )
    token_ids = [proposal.draft_token_ids, *(support.token_ids for support in proposal.supports)]
    _check_ids(token_ids, vocabulary_size, "the draft")
    for token_id, support in zip(proposal.draft_token_ids, proposal.supports, strict=False):
        entry_of(int(token_id), support)


def check_verification(verification: Verification, address: str, *, vocabulary_size: int) -> None:
    """Refuses an answer that chooses a token the vocabulary does not have.

    Raises:
        Internal: it does; the message names the replica at `address`.
    """
    tails = [row.tail_token_id for row in verification.rows if row.tail_token_id >= 0]
    _check_ids([verification.choice_token_ids, np.array(tails, dtype=np.uint32)], vocabulary_size, f"target {address}")


def _check_ids(arrays: Iterable[TokenIds], vocabulary_size: int, who: str) -> None:
    for token_ids in arrays:
        if len(token_ids) and int(token_ids.max()) >= vocabulary_size:
            raise Internal(f"{who} answered token id {int(token_ids.max())}, the vocabulary has {vocabulary_size}")
