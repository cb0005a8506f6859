"""What a target's local draft would have drawn committed tokens with, in the round that begins at each of them.

All tokens are run once. Then rounds are drafted from the last one backwards, with the committed tokens in place of
drawn ones: a draft writes over features from its own beginning on alone, so that what an earlier one begins with is
still what the full step wrote.

Not here: what q is (`specdec.engine.drafting.drawing`), what follows for acceptance (the coordinator, which knows p).
Called by `verifier`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.engine.base import ModelShape
from specdec.engine.sessions.calls import Call
from specdec.engine.sessions.request_checks import check_round, check_scored
from specdec.errors import InvalidRequest
from specdec.types import SCORED_GAMMA, Score, ScoreRequest, TokenIds

_NO_TOKENS = np.empty(0, dtype=np.uint32)


def check_scorable(request: ScoreRequest, shape: ModelShape) -> None:
    """Raises InvalidRequest: it is no span, there is no such local draft, or no room for the tokens."""
    check_round(request.position, shape.vocabulary_size)
    check_scored(request, shape.vocabulary_size)
    if request.local_pool not in shape.local_drafts:
        raise InvalidRequest(f"{request.local_pool[:64]!r} is no local draft of this target", field="local_pool")
    num_tokens = request.position.committed_len + len(request.token_ids)
    if num_tokens > shape.max_context_tokens:
        raise InvalidRequest(
            f"{num_tokens} tokens, the context is {shape.max_context_tokens}",
            reason="CONTEXT_TOO_LONG",
            field="round.token_ids",
        )


class ScoredSpan:
    """The calls that score one span, one after the other, in a session of their own."""

    def __init__(self, session_id: str, request: ScoreRequest, shape: ModelShape) -> None:
        """`session_id`: of nobody else's; whoever made it releases it. `request`: one that `check_scorable` passes."""
        self.session_id = session_id
        self._request = request
        self._token_ids = np.concatenate([request.position.token_ids, request.token_ids])
        most = dict(zip(shape.local_drafts, shape.local_gammas, strict=False)).get(request.local_pool)
        self._gamma = min(most or SCORED_GAMMA, SCORED_GAMMA)

    async def score(self, call: Callable[[Call], Awaitable[Any]]) -> Score:
        """Has the calls run, by `call`. Raises as that does."""
        num_tokens = len(self._token_ids)
        await call(self._full_step())
        rounds: list[Score] = []
        for first in range(num_tokens - 1, self._request.position.committed_len - 1, -1):
            rounds.append(await call(self._round(first)))
        rounds.reverse()
        num_steps = sum(len(scored.q) for scored in rounds)
        return Score(
            q=tuple(q for scored in rounds for q in scored.q),
            forward_s=0.0,  # who goes on with this draft has nothing to prefill
            step_s=sum(scored.forward_s for scored in rounds) / num_steps if num_steps else 0.0,
            round_lengths=tuple(len(scored.q) for scored in rounds),
        )

    def _full_step(self) -> Call:
        """Runs all tokens. What is run as draft tokens is not shared with others, so that rounds may write over it."""
        committed_len = max(1, self._request.position.committed_len - 1)
        token_ids = self._token_ids[committed_len:-1]
        return self._call(0, committed_len, token_ids, draft_token_ids=token_ids)

    def _round(self, first: int) -> Call:
        """Drafts, as a round would, the tokens from `first` on."""
        token_ids = self._token_ids[first : first + self._gamma]
        return self._call(len(self._token_ids) - first, first, token_ids, local_draft=self._request.local_pool)

    def _call(
        self,
        round_id: int,
        committed_len: int,
        token_ids: TokenIds,
        *,
        draft_token_ids: TokenIds = _NO_TOKENS,
        local_draft: str = "",
    ) -> Call:
        position = replace(
            self._request.position,
            session_id=self.session_id,
            round_id=round_id,
            token_ids=self._token_ids[:committed_len],
        )
        return Call(
            request=ScoreRequest(position, token_ids),
            digest=b"",  # nobody repeats it
            draft_token_ids=draft_token_ids,
            num_logit_rows=1,
            max_kv_len=committed_len + len(token_ids),
            preemptible=True,
            keeps_session=True,
            local_draft=local_draft,
        )
