"""Target-only passes over the tokens of a live session, in a session of their own.

The session id exists once, so a pass can neither reach nor outdate the live session, and its KV is released at the end.
The live session's published KV blocks are used again, which keeps a pass as short as a round. `choices` and
`distributions` make the calls; `audit_queue` opens and closes the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.audit.audited_round import AuditedRound
from coordinator.round.answers import check_verification
from specdec.contract.types import DrawRule, SamplingFilters, SessionPosition, TokenIds, Verification, VerifyRequest


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
            support_ids: ids per draft token at which the target reports p, where distributions travel.
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
        )
        self._num_calls += 1
        request = VerifyRequest(position, np.asarray(draft_token_ids, dtype=np.uint32), support_ids)
        verification = await audited.replica.link.verify(request, model=audited.model)
        check_verification(verification, audited.replica.address, vocabulary_size=setting.vocabulary_size)
        return verification

    async def close(self) -> None:
        """Free the KV of the pass. Raises Unavailable where the target cannot be reached."""
        await self._audited.replica.link.release([self._session_id], tenant=self._audited.setting.tenant)
