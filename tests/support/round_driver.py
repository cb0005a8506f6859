"""The least coordinator there can be: one session's rounds against a proposer and a verifier in this process.

No store, no wire, no deadlines. It keeps the delta rule of docs/protocol.md section 5 and answers one miss a round.
Called by tests of the engines.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from specdec.contract.engine_api import DraftEngine, TargetEngine
from specdec.contract.errors import KvMiss
from specdec.contract.tenant import DEFAULT_TENANT
from specdec.contract.types import (
    DrawRule,
    LocalDraft,
    Mode,
    Proposal,
    ProposeRequest,
    SamplingFilters,
    SessionPosition,
    Verification,
    VerifyRequest,
)
from specdec.core.block import verify_block
from specdec.core.coupling import verify_choices
from specdec.core.random import DrawKey
from specdec.core.reference import chain_hash
from specdec.core.rejection import Decision, verify_rejection

AnswerT = TypeVar("AnswerT")

NO_DRAFT = Proposal(np.empty(0, dtype=np.uint32), (), (), 0, 0, 0.0)


def make_round(
    tokens: Sequence[int],
    *,
    session_id: str = "s",
    epoch: int = 1,
    round_id: int = 0,
    start: int = 0,
    filters: SamplingFilters | None = None,
    seed: int = 0,
    output_start: int = 0,
    draw_rule: DrawRule = DrawRule.DISTRIBUTION,
    max_session_tokens: int = 0,
    tenant: str = DEFAULT_TENANT,
) -> SessionPosition:
    """The round of a session whose committed tokens are `tokens`, sent from `start` on."""
    return SessionPosition(
        session_id=session_id,
        epoch=epoch,
        round_id=round_id,
        start=start,
        prefix_hash=chain_hash(tokens[:start]),
        token_ids=np.array(tokens[start:], dtype=np.uint32),
        filters=filters or SamplingFilters(temperature=0.0),
        seed=seed,
        turn=0,
        output_start=output_start,
        draw_rule=draw_rule,
        max_session_tokens=max_session_tokens,
        tenant=tenant,
    )


@dataclass
class RoundDriver:
    """One generation. `tokens` holds what is committed."""

    session_id: str
    tokens: list[int]
    proposer: DraftEngine | None
    verifier: TargetEngine
    filters: SamplingFilters = field(default_factory=lambda: SamplingFilters(temperature=0.0))
    mode: Mode = Mode.REJECTION
    seed: int = 0
    epoch: int = 1
    round_id: int = 0
    draft_start: int = 0
    target_start: int = 0
    num_misses: int = 0
    decisions: list[Decision] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    local_pool: str = ""
    """What the verifier is to draft with by itself, where there is no proposer."""

    def __post_init__(self) -> None:
        self.output_start = len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.output_start :]

    async def generate(self, num_tokens: int, gamma: int) -> list[int]:
        """Runs rounds until `num_tokens` tokens are out; returns them."""
        while len(self.output) < num_tokens:
            await self.run_round(min(gamma, num_tokens - len(self.output) - 1))
        return self.output

    async def run_round(self, gamma: int) -> Decision:
        """One round; gamma 0 is a target-only step."""
        self.round_id += 1
        proposal = NO_DRAFT
        if gamma > 0 and self.proposer is not None:
            proposal = await self._resend(self._propose, self.draft_start, gamma)
        local = LocalDraft(self.local_pool, gamma) if gamma > 0 and self.local_pool else None
        verification = await self._resend(self._verify, self.target_start, (proposal, local))
        proposal = verification.drafted or proposal
        decision = self._decide(proposal, verification)
        common_len = len(self.tokens) + decision.num_accepted
        self.tokens += [int(token_id) for token_id in decision.token_ids]
        if proposal is not NO_DRAFT and self.proposer is not None:
            self.draft_start = min(proposal.kv_len, common_len)
        self.target_start = min(verification.kv_len, common_len)
        self.decisions.append(decision)
        self.proposals.append(proposal)
        return decision

    async def _resend(self, call: Callable[..., Awaitable[AnswerT]], start: int, argument: object) -> AnswerT:
        try:
            return await call(start, argument)
        except KvMiss as miss:
            self.num_misses += 1
            return await call(miss.have, argument)

    def _round(self, start: int) -> SessionPosition:
        return replace(
            make_round(self.tokens, start=start, filters=self.filters, seed=self.seed, output_start=self.output_start),
            session_id=self.session_id,
            epoch=self.epoch,
            round_id=self.round_id,
            draw_rule=DrawRule.COUPLED if self.mode in (Mode.COUPLED, Mode.OFF) else DrawRule.DISTRIBUTION,
        )

    async def _propose(self, start: int, gamma: int) -> Proposal:
        return await self.proposer.propose(ProposeRequest(self._round(start), gamma))

    async def _verify(self, start: int, draft: tuple[Proposal, LocalDraft | None]) -> Verification:
        proposal, local = draft
        support_ids = tuple(support.token_ids for support in proposal.supports)
        return await self.verifier.verify(
            VerifyRequest(self._round(start), proposal.draft_token_ids, support_ids, local_draft=local)
        )

    def _decide(self, proposal: Proposal, verification: Verification) -> Decision:
        if not verification.rows:
            return verify_choices(
                proposal.draft_token_ids, verification.choice_token_ids, verification.choice_probabilities
            )
        verify = verify_block if self.mode is Mode.BLOCK else verify_rejection
        key = DrawKey(self.seed, 0, len(self.tokens))
        return verify(proposal.draft_token_ids, proposal.supports, verification.rows, key)
