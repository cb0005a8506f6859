"""Where the tokens of a decided round came from: source, p, q, logprobs.

Not here: the decision (core), the wire. Called by `runner`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.requests import Provenance, TokenLogprobs, TopLogprob
from specdec.core.rejection import Decision
from specdec.types import LogitRow, Support, Verification


def trace_tokens(
    decision: Decision, supports: Sequence[Support], verification: Verification, draft_pool: str
) -> Provenance:
    """Columns over the decided tokens; logprobs are set when the target sent logit rows."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    if verification.logit_rows:
        logprobs = tuple(
            _logprobs(token_id, index, supports, verification) for index, token_id in enumerate(decision.token_ids)
        )
    return Provenance(decision.sources, decision.p, decision.q, draft_pool, logprobs)


def _logprobs(token_id: int, index: int, supports: Sequence[Support], verification: Verification) -> TokenLogprobs:
    row = verification.logit_rows[index]
    support = supports[index] if index < len(supports) else None
    return TokenLogprobs(
        logprob=_emitted_logit(token_id, row, support) - row.logsumexp,
        top=tuple(
            TopLogprob(int(top_id), float(logit) - row.logsumexp)
            for top_id, logit in zip(row.top_token_ids, row.top_logits, strict=True)
        ),
    )


def _emitted_logit(token_id: int, row: LogitRow, support: Support | None) -> float:
    """The emitted token is in the position's support, or it is the one token outside that the target named."""
    if support is not None:
        place = int(np.searchsorted(support.token_ids, token_id))
        if place < len(support.token_ids) and support.token_ids[place] == token_id:
            return float(row.support_logits[place])
    return row.tail_logit
