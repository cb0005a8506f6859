"""The outcome of one round: the decided tokens, where each came from, and what the round cost.

The `runner` makes it. `generation/publisher` commits the tokens, `generation/accounting` counts the round, and
`request_router` learns from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coordinator.requests import Provenance, RankedLogprob, TokenLogprobs
from coordinator.round.draft_calls import Draft
from coordinator.round.timeline import RoundTimeline
from specdec.contract.types import LogitRow, Support, TokenIds, Verification
from specdec.core.rejection import Decision


class RoundOutcome(NamedTuple):
    """The decision of a round. Nothing of it is committed yet."""

    token_ids: tuple[int, ...]
    provenance: Provenance
    draft_token_ids: TokenIds
    num_draft_tokens: int
    num_accepted: int
    draft_s: float
    """Wait for the draft; 0 when none was requested."""
    verify_s: float
    wire_bytes: int
    """Bytes of all calls, failed ones included."""
    num_cached_tokens: int
    """Number of committed tokens whose KV the target already held."""
    draft_pool: str
    target_only_cause: str
    """Reason for a missing draft: off, paused, no_replica, draft_context, late, empty, no_match, not_drafted (by a
    target that was to draft by itself), or an error's reason; "" if there was a draft token."""
    supports: Sequence[Support]
    """Supports of the draft tokens; empty in greedy and coupled rounds."""
    verification: Verification
    num_requested: int = 0
    """Number of draft tokens requested; 0 if no draft was, or no replica answered."""
    timeline: RoundTimeline | None = None
    """Recorded if the setting says so."""
    num_forced: int = 0
    """Number of leading draft tokens that the request's constraint forces; `draft_pool` did not draft them."""


def trace_tokens(decision: Decision, draft: Draft, verification: Verification) -> Provenance:
    """Return where the decided tokens came from, as columns; logprobs are set when the target sent logit rows."""
    proposal = draft.proposal
    logprobs: tuple[TokenLogprobs, ...] = ()
    if verification.logit_rows:
        logprobs = tuple(
            _logprobs(token_id, index, proposal.supports, verification)
            for index, token_id in enumerate(decision.token_ids)
        )
    num_draft_tokens = len(proposal.draft_token_ids)
    return Provenance(
        decision.sources, decision.p, decision.q, draft.pool, logprobs, num_draft_tokens, draft.num_forced
    )


def _logprobs(token_id: int, index: int, supports: Sequence[Support], verification: Verification) -> TokenLogprobs:
    row = verification.logit_rows[index]
    support = supports[index] if index < len(supports) else None
    return TokenLogprobs(
        logprob=_emitted_logit(token_id, row, support) - row.logsumexp,
        top=tuple(
            RankedLogprob(int(top_id), float(logit) - row.logsumexp)
            for top_id, logit in zip(row.top_token_ids, row.top_logits, strict=True)
        ),
    )


def _emitted_logit(token_id: int, row: LogitRow, support: Support | None) -> float:
    """Return the logit of the emitted token, which is in the position's support or is the row's tail token."""
    if support is not None:
        place = int(np.searchsorted(support.token_ids, token_id))
        if place < len(support.token_ids) and support.token_ids[place] == token_id:
            return float(row.support_logits[place])
    return row.tail_logit
