"""Score committed tokens by a target's local draft, in the round that begins at each of them.

All tokens run once. Then rounds are drafted from the last one backwards, along the committed tokens. A draft overwrites
features only from its own beginning on, so the features at an earlier beginning are still those of the full step.

`specdec.engine.drafting.drawing` computes q, and the coordinator derives the acceptance. Called by `verifier`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.contract.constraint import Constraint
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import SCORED_GAMMA, Score, ScoreRequest, TokenIds
from specdec.engine.base import ModelShape
from specdec.engine.sessions.calls import Call

_NO_TOKENS = np.empty(0, dtype=np.uint32)


def check_scorable(request: ScoreRequest, shape: ModelShape) -> None:
    """Raise InvalidRequest if the local draft is unknown, or the context too short."""
    if request.local_pool not in shape.local_drafts:
        raise InvalidRequest(f"this target has no local draft {request.local_pool[:64]!r}", field="local_pool")
    num_tokens = request.position.committed_len + len(request.token_ids)
    if num_tokens > shape.max_context_tokens:
        raise InvalidRequest(
            f"{num_tokens} tokens, the context is {shape.max_context_tokens}",
            reason="CONTEXT_TOO_LONG",
            field="round.token_ids",
        )


class ScoredSpan:
    """The calls that score one span, one after another, in a private session."""

    def __init__(
        self, session_id: str, request: ScoreRequest, shape: ModelShape, constraint: Constraint | None
    ) -> None:
        """
        Args:
            session_id: names a private session that the caller releases.
            request: has passed `check_scorable`.
            shape: shape of the target.
            constraint: constraint by which drafts are masked.
        """
        self.session_id = session_id
        self._request = request
        self._constraint = constraint
        self._token_ids = np.concatenate([request.position.token_ids, request.token_ids])
        most = dict(zip(shape.local_drafts, shape.local_gammas, strict=False)).get(request.local_pool)
        self._gamma = min(most or SCORED_GAMMA, SCORED_GAMMA)

    async def score(self, call: Callable[[Call], Awaitable[Any]]) -> Score:
        """Run the calls through `call`, and return the score. Raises the errors of `call`."""
        num_tokens = len(self._token_ids)
        await call(self._full_step())
        rounds: list[Score] = []
        for first in range(num_tokens - 1, self._request.position.committed_len - 1, -1):
            rounds.append(await call(self._round(first)))
        rounds.reverse()
        num_steps = sum(len(scored.q) for scored in rounds)
        return Score(
            q=tuple(q for scored in rounds for q in scored.q),
            forward_s=0.0,  # a session that continues with this draft needs no prefill
            step_s=sum(scored.forward_s for scored in rounds) / num_steps if num_steps else 0.0,
            round_lengths=tuple(len(scored.q) for scored in rounds),
        )

    def _full_step(self) -> Call:
        """Run all tokens. Tokens that run as draft tokens are not published, so that rounds may overwrite them."""
        committed_len = max(1, self._request.position.committed_len - 1)
        token_ids = self._token_ids[committed_len:-1]
        return self._call(0, committed_len, token_ids, draft_token_ids=token_ids)

    def _round(self, first: int) -> Call:
        """Draft a round along the tokens from `first` on."""
        token_ids = self._token_ids[first : first + self._gamma]
        return self._call(
            len(self._token_ids) - first,
            first,
            token_ids,
            local_draft=self._request.local_pool,
            constraint=self._constraint,
        )

    def _call(
        self,
        round_id: int,
        committed_len: int,
        token_ids: TokenIds,
        *,
        draft_token_ids: TokenIds = _NO_TOKENS,
        local_draft: str = "",
        constraint: Constraint | None = None,
    ) -> Call:
        position = replace(
            self._request.position,
            session_id=self.session_id,
            round_id=round_id,
            token_ids=self._token_ids[:committed_len],
        )
        return Call(
            request=ScoreRequest(position, token_ids),
            identity=(),  # this call is never repeated
            draft_token_ids=draft_token_ids,
            num_logit_rows=1,
            max_kv_len=committed_len + len(token_ids),
            constraint=constraint,
            preemptible=True,
            keeps_session=True,
            local_draft=local_draft,
        )
