"""One round, from the committed tokens to the next ones: propose, verify, decide.

docs/protocol.md is the specification. The draft comes from a source (`draft_sources`), the verification from
`target_calls`, and `specdec.core` decides. The decided tokens go back to `generation/generation`, which publishes
them. The target never waits for anything optional: a missing draft makes the round a target-only step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from coordinator.replicas.placement import SessionReplicas
from coordinator.round.draft_calls import Draft
from coordinator.round.draft_sources import DraftSource
from coordinator.round.outcome import RoundOutcome, trace_tokens
from coordinator.round.pool_stats import RoundTimes, RunStepTimes
from coordinator.round.session_tokens import SessionTokens
from coordinator.round.setting import RoundSetting
from coordinator.round.target_calls import TargetAnswer, TargetCalls
from coordinator.round.timeline import RoundTimeline
from specdec.contract.types import Mode, Proposal, Verification
from specdec.core.block import verify_block
from specdec.core.coupling import verify_choices
from specdec.core.random import DrawKey
from specdec.core.rejection import Decision, verify_rejection
from specdec.rpc.open_calls import WireStats

#: Largest number of tokens that a run may be ahead of the committed ones: they are in vain if the output ends.
MAX_AHEAD = 8


class RoundRunner:
    """Runs the rounds of one request."""

    def __init__(
        self,
        setting: RoundSetting,
        tokens: SessionTokens,
        replicas: SessionReplicas,
        drafts: DraftSource,
        target_calls: TargetCalls,
        may_run_ahead: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        Args:
            setting: parameters of the request's rounds.
            tokens: shared with the caller, who appends what it commits of each round.
            replicas: replicas of the session.
            drafts: source of the request's drafts.
            target_calls: target calls of the request.
            may_run_ahead: returns whether runs are allowed now: other tenants do not wait for their share.
        """
        self._setting = setting
        self._tokens = tokens
        self._replicas = replicas
        self._drafts = drafts
        self._target_calls = target_calls
        self._may_run_ahead = may_run_ahead
        self._run_draft = Draft()
        """The draft, without tokens, that the open run was begun with."""
        self._run_end = 0
        """Length of the session at which the source of drafts is asked again."""
        self._most_len = 0
        """Largest number of tokens that the session can hold after the turn."""

    async def run(self, round_id: int, remaining: int) -> RoundOutcome:
        """Run one round. Cancelling abandons the calls in flight; the replicas stay consistent.

        Args:
            round_id: rises by one per committed round of the session.
            remaining: number of output tokens that may still follow, at least 1.

        Raises:
            Unavailable: no target replica can serve.
            ResourceExhausted: no target replica has KV blocks left.
            Internal: the last target replica failed, or refused its request.
            StaleEpoch: another coordinator has taken the session over.
        """
        committed_len = len(self._tokens)
        timeline = RoundTimeline(time.monotonic()) if self._setting.is_timed else None

        # A round emits one token more than it has draft tokens.
        self._most_len = committed_len + remaining
        if self._target_calls.is_in_run:
            draft = self._run_draft
        else:
            draft = self._run_draft = await self._drafts.propose(round_id, remaining - 1, committed_len)
            self._run_end = committed_len + draft.run_portion
        if timeline is not None:
            address = "" if draft.replica is None else draft.replica.address
            timeline.note_draft(draft.sent_s, draft.received_s, draft.proposal.stages, address)

        wire = WireStats()
        target = await self._target_calls.verify(round_id, draft, wire, until=self._until(committed_len))
        if timeline is not None:
            timeline.note_target(wire.sent_s, wire.heard_s, target.verification.stages, target.replica.address)
        draft = self._drafts.complete(draft, target)

        decision = self._decide(draft.proposal, target.verification, committed_len)

        verify_s = target.wait_s - draft.verification_share_s
        if target.is_step_of_run:
            self._replicas.learn(target.replica, target.verification.kv_len)
            step = target.verification
            if step.forward_s > 0.0:  # a forced token runs with the one before it, and takes no time
                times = RunStepTimes(target.wait_s, step.forward_s, step.step_tokens, committed_len)
                self._drafts.observe_run_step(times)
        else:
            self._learn(draft, target, verify_s, committed_len, decision.num_accepted)
        if timeline is not None:
            timeline.decided_s = time.monotonic()
        return RoundOutcome(
            token_ids=decision.token_ids,
            provenance=trace_tokens(decision, draft, target.verification),
            draft_token_ids=draft.proposal.draft_token_ids,
            num_draft_tokens=len(draft.proposal.draft_token_ids),
            num_accepted=decision.num_accepted,
            draft_s=draft.wait_s,
            verify_s=verify_s,
            wire_bytes=draft.wire_bytes + wire.num_bytes,
            num_cached_tokens=target.verification.num_cached_tokens,
            draft_pool=draft.pool,
            target_only_cause=draft.missing_cause,
            supports=draft.proposal.supports,
            verification=target.verification,
            num_requested=draft.num_requested,
            timeline=timeline,
            num_forced=draft.num_forced,
        )

    def note_committed(self, committed_len: int) -> None:
        """Let an open run go on, unless the source of drafts would draft now."""
        if not (self._target_calls.is_in_run and self._may_run_ahead()):
            return
        until = self._until(committed_len)
        if until == self._run_end < self._most_len and not self._drafts.wants_draft(self._most_len - committed_len - 1):
            self._run_end += self._run_draft.run_portion
            until = self._until(committed_len)
        self._target_calls.renew(until, committed_len)

    def close(self) -> None:
        """Leave an open run."""
        self._target_calls.close()

    def _until(self, committed_len: int) -> int:
        """Return the number of tokens up to which a run may go on now."""
        ahead = MAX_AHEAD if self._may_run_ahead() else 1
        return min(committed_len + ahead, self._run_end, self._most_len)

    def _decide(self, proposal: Proposal, verification: Verification, committed_len: int) -> Decision:
        draft_token_ids = proposal.draft_token_ids.tolist()
        if self._setting.answers_choices:
            return verify_choices(draft_token_ids, verification.choice_token_ids, verification.choice_probabilities)
        key = DrawKey(self._setting.seed, self._setting.turn, committed_len)
        verify = verify_block if self._setting.mode is Mode.BLOCK else verify_rejection
        return verify(draft_token_ids, proposal.supports, verification.rows, key)

    def _learn(
        self, draft: Draft, target: TargetAnswer, verify_s: float, committed_len: int, num_accepted: int
    ) -> None:
        """Note what the round showed about the replicas' KV, about times and about acceptance."""
        drafted, verified = draft.proposal, target.verification
        # KV beyond the accepted tokens belongs to rejected ones. The final token is in no KV yet. The draft also lacks
        # the KV of its own last token, which kv_len says.
        agreed_len = committed_len + num_accepted
        self._replicas.learn(target.replica, min(verified.kv_len, agreed_len))
        if draft.replica is not None:
            self._replicas.learn(draft.replica, min(drafted.kv_len, agreed_len))
        self._drafts.observe(
            draft,
            RoundTimes(
                num_draft_tokens=len(drafted.draft_token_ids),
                num_accepted=num_accepted,
                draft_s=draft.wait_s if draft.num_requested else 0.0,
                verify_s=verify_s,
                verify_forward_s=verified.forward_s,
                num_prefilled=committed_len - verified.num_cached_tokens,
                num_draft_prefilled=committed_len - drafted.num_cached_tokens if draft.replica is not None else 0,
                committed_len=committed_len,
                num_requested=draft.num_requested,
                step_tokens=verified.step_tokens,
                num_concurrent=verified.num_concurrent if target.is_same_replica else 0,
                num_other_rows=verified.num_other_rows if target.is_same_replica else 0,
            ),
        )
