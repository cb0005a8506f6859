"""One round, from the committed tokens to the next ones: propose, verify, decide.

docs/protocol.md is the specification. The draft comes from a `draft_source`, or with the target's own answer where it
drafts by itself, and the target is asked by `target_calls`;
the decided tokens go back to `generation/generation`, which has them published. The target never waits for anything
optional: a draft that gives nothing makes the round a target-only step. Not here: what happens to the decided tokens,
the maths (core), the wire (rpc).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from coordinator.replicas.placement import SessionReplicas
from coordinator.requests import Provenance
from coordinator.round.draft_calls import DraftAnswer
from coordinator.round.draft_source import DraftSource
from coordinator.round.gamma import RoundTimes
from coordinator.round.provenance import trace_tokens
from coordinator.round.setting import RoundSetting
from coordinator.round.target_calls import TargetAnswer, TargetCalls
from coordinator.round.timeline import RoundTimeline
from coordinator.round.tokens import SessionTokens
from specdec.core.block import verify_block
from specdec.core.coupling import verify_choices
from specdec.core.random import DrawKey
from specdec.core.rejection import Decision, verify_rejection
from specdec.rpc.calls import WireStats
from specdec.types import Mode, Proposal, Support, Verification


class RoundOutcome(NamedTuple):
    """What a round decided. Nothing of it is committed yet."""

    token_ids: tuple[int, ...]
    provenance: Provenance
    num_draft_tokens: int
    num_accepted: int
    draft_s: float
    """Wait for the draft, 0 when it was not asked."""
    verify_s: float
    wire_bytes: int
    """Of all its calls, missed and failed ones too."""
    num_cached_tokens: int
    """Committed tokens whose KV the target already held."""
    draft_pool: str
    target_only_cause: str
    """Why there was no draft token: off, paused, no_replica, draft_context, late, empty, no_match, not_drafted (by a
    target asked to), or an error's reason; "" where there was one."""
    supports: Sequence[Support]
    """Of the draft tokens; empty in greedy and coupled rounds."""
    verification: Verification
    timeline: RoundTimeline | None = None
    """Where the setting asks for it."""


class RoundRunner:
    """Runs the rounds of one request."""

    def __init__(
        self,
        setting: RoundSetting,
        tokens: SessionTokens,
        replicas: SessionReplicas,
        drafts: DraftSource,
        target_calls: TargetCalls,
    ) -> None:
        """
        Args:
            setting: of the request.
            tokens: shared with the caller, who extends it by what it commits of each round.
            replicas: the session's.
            drafts: the request's.
            target_calls: the request's.
        """
        self._setting = setting
        self._tokens = tokens
        self._replicas = replicas
        self._drafts = drafts
        self._target_calls = target_calls

    async def run(self, round_id: int, remaining: int) -> RoundOutcome:
        """Runs one round.

        Args:
            round_id: rises by one per committed round of the session.
            remaining: output tokens that may still follow, at least 1.

        Cancelling abandons the calls in flight; replicas stay consistent.

        Raises:
            Unavailable: no target replica can serve.
            ResourceExhausted: no target replica has KV blocks left.
            Internal: the last target replica there was failed, or refused what it was asked.
            StaleEpoch: another coordinator has taken the session over.
        """
        committed_len = len(self._tokens)
        wire = WireStats()
        timeline = RoundTimeline(time.monotonic()) if self._setting.is_timed else None

        # A round emits one token more than it has draft tokens.
        draft = await self._drafts.propose(round_id, remaining - 1, committed_len, wire)
        if timeline is not None:
            timeline.note_draft(wire, draft.replica is not None, draft.proposal.stages)

        target = await self._target_calls.verify(round_id, draft.proposal, wire, draft.local)
        if timeline is not None:
            timeline.note_target(wire, target.verification.stages)
        if draft.local is not None:
            draft = draft.drafted_by(target.replica, target.verification, target.wait_s)
            target = target._replace(wait_s=target.wait_s - draft.wait_s)

        decision = self._decide(draft.proposal, target.verification, committed_len)

        self._learn(draft, target, committed_len, decision.num_accepted)
        if timeline is not None:
            timeline.decided_s = time.monotonic()
        return RoundOutcome(
            token_ids=decision.token_ids,
            provenance=trace_tokens(decision, draft.proposal.supports, target.verification, draft.pool),
            num_draft_tokens=len(draft.proposal.draft_token_ids),
            num_accepted=decision.num_accepted,
            draft_s=draft.wait_s,
            verify_s=target.wait_s,
            wire_bytes=wire.num_bytes,
            num_cached_tokens=target.verification.num_cached_tokens,
            draft_pool=draft.pool,
            target_only_cause=draft.missing_cause,
            supports=draft.proposal.supports,
            verification=target.verification,
            timeline=timeline,
        )

    def _decide(self, proposal: Proposal, verification: Verification, committed_len: int) -> Decision:
        draft_token_ids = proposal.draft_token_ids.tolist()
        if self._setting.answers_choices:
            return verify_choices(draft_token_ids, verification.choice_token_ids, verification.choice_probabilities)
        key = DrawKey(self._setting.seed, self._setting.turn, committed_len)
        verify = verify_block if self._setting.mode is Mode.BLOCK else verify_rejection
        return verify(draft_token_ids, proposal.supports, verification.rows, key)

    def _learn(self, draft: DraftAnswer, target: TargetAnswer, committed_len: int, num_accepted: int) -> None:
        """Notes what the round showed about replicas and acceptance."""
        drafted, verified = draft.proposal, target.verification
        # KV beyond the accepted tokens is of tokens that are not the session's. The final token is in no KV yet, and
        # the draft lacks its own last token too, which kv_len tells.
        agreed_len = committed_len + num_accepted
        self._replicas.learn(target.replica, min(verified.kv_len, agreed_len))
        if draft.replica is not None:
            self._replicas.learn(draft.replica, min(drafted.kv_len, agreed_len))
        self._drafts.observe(
            draft,
            RoundTimes(
                num_draft_tokens=len(drafted.draft_token_ids),
                num_accepted=num_accepted,
                draft_s=draft.wait_s if draft.replica is not None or draft.local is not None else 0.0,
                verify_s=target.wait_s,
                verify_forward_s=verified.forward_s,
                num_prefilled=committed_len - verified.num_cached_tokens,
                num_draft_prefilled=committed_len - drafted.num_cached_tokens if draft.replica is not None else 0,
                committed_len=committed_len,
                num_asked=draft.num_asked,
                step_tokens=verified.step_tokens,
                num_concurrent=verified.num_concurrent if target.is_same_replica else 0,
                num_other_rows=verified.num_other_rows if target.is_same_replica else 0,
            ),
        )
