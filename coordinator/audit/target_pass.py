"""Target-only passes over the tokens of a live session, and the differences that rounding explains.

A pass has its own session id, which exists once, so it can neither reach nor outdate the live session, and its KV is
released at the end. The live session's published KV blocks are used again, which keeps a pass as short as a round.
`distributions` makes the calls; `audit_queue` opens and closes the pass.

Passes of different batch shapes may differ in the last bits (docs/protocol.md section 4). A difference of two tokens'
scores within the tolerance is a tie. A token at the edge of top-k, top-p or min-p may be cut in one pass and kept in
the other; filters that are nudged to both sides show it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from coordinator.audit.audited_round import AuditedRound
from coordinator.round.answers import check_verification
from specdec.contract.types import DrawRule, SamplingFilters, SessionPosition, TokenIds, Verification, VerifyRequest

#: Difference of two logits that rounding may explain, for float32 and for every other dtype of a target.
FLOAT32_LOGIT_GAP = 1e-3
OTHER_LOGIT_GAP = 0.25


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Tolerance of one request's distributions."""

    gap: float
    """Difference of two log probabilities."""

    @property
    def mass(self) -> float:
        """Total variation of two distributions whose log probabilities differ by at most half of `gap` each way."""
        return math.tanh(self.gap / 2.0)


def tolerance_of(dtype: str, filters: SamplingFilters) -> Tolerance:
    """Return the tolerance for a target of this dtype; a low temperature magnifies differences of logits."""
    logit_gap = FLOAT32_LOGIT_GAP if dtype == "float32" else OTHER_LOGIT_GAP
    return Tolerance(logit_gap / (filters.temperature or 1.0))


def nudged_filters(filters: SamplingFilters, tolerance: Tolerance) -> tuple[SamplingFilters, ...]:
    """Return the filters with a slightly narrower and a slightly wider cut; () if nothing is cut."""
    if not (filters.top_k or filters.top_p < 1.0 or filters.min_p > 0.0):
        return ()
    mass = tolerance.mass
    narrower = replace(
        filters,
        top_k=max(1, filters.top_k - 1) if filters.top_k else 0,
        top_p=max(filters.top_p * 0.5, filters.top_p - mass) if filters.top_p < 1.0 else 1.0,
        min_p=min(filters.min_p * (1.0 + mass), (1.0 + filters.min_p) / 2.0),
    )
    wider = replace(
        filters,
        top_k=filters.top_k + 1 if filters.top_k else 0,
        top_p=min(1.0, filters.top_p + mass),
        min_p=filters.min_p * (1.0 - mass),
    )
    return narrower, wider


class TargetPass:
    """The calls of one audit. Only one call may run at a time."""

    def __init__(self, audited: AuditedRound, session_id: str) -> None:
        """`session_id` belongs to this pass alone."""
        self._audited = audited
        self._session_id = session_id
        self._num_calls = 0

    async def verify(
        self,
        token_ids: TokenIds,
        draft_token_ids: Sequence[int] | TokenIds,
        support_ids: Sequence[TokenIds] = (),
        *,
        filters: SamplingFilters | None = None,
        draw_rule: DrawRule | None = None,
    ) -> Verification:
        """Return the target's answer after `token_ids` and along the draft tokens.

        Args:
            token_ids: committed tokens, from the session's first on.
            draft_token_ids: tokens to run after them.
            support_ids: ids per draft token at which the target reports p, if distributions travel.
            filters: None: those of the live request.
            draw_rule: None: that of the live request.

        Raises:
            SpecdecError: the target refused the call, could not be reached, or answered nonsense.
        """
        audited, setting = self._audited, self._audited.setting
        position = SessionPosition(
            session_id=self._session_id,
            epoch=1,
            round_id=self._num_calls,
            start=0,
            prefix_hash=b"",
            token_ids=token_ids,
            filters=setting.filters if filters is None else filters,
            seed=setting.seed,
            turn=setting.turn,
            output_start=setting.output_start,
            draw_rule=setting.draw_rule if draw_rule is None else draw_rule,
            tenant=setting.tenant,
            constraint=setting.constraint,
        )
        self._num_calls += 1
        request = VerifyRequest(position, np.asarray(draft_token_ids, dtype=np.uint32), support_ids)
        verification = await audited.replica.link.verify(request, model=audited.model)
        check_verification(verification, audited.replica.address, vocabulary_size=setting.vocabulary_size)
        return verification

    async def close(self) -> None:
        """Free the KV of the pass. Raises Unavailable if the target cannot be reached."""
        await self._audited.replica.link.release([self._session_id], tenant=self._audited.setting.tenant)
