"""One round: choose gamma, propose, verify, decide. The target never waits for anything optional.

docs/protocol.md is the specification. Not here: what happens to the decided tokens (`session`), the maths (core), the
wire (rpc). A late, dead or confused draft turns the round into a target-only step; a dead target moves the session to
another replica. Called by a generation, one round at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from coordinator.replicas.placement import SessionReplicas
from coordinator.replicas.pool import DraftReplica, Replica, TargetReplica
from coordinator.requests import Provenance
from coordinator.round.answers import check_proposal, check_verification, target_fault
from coordinator.round.draft_clock import DraftClock
from coordinator.round.gamma import GammaChooser, RoundTimes
from coordinator.round.provenance import trace_tokens
from coordinator.round.tokens import SessionTokens
from specdec.core.block import verify_block
from specdec.core.coupling import verify_choices
from specdec.core.packed import pack_supports
from specdec.core.random import DrawKey
from specdec.core.rejection import Decision, verify_rejection
from specdec.errors import KvMiss, SpecdecError, StaleEpoch, Unavailable
from specdec.rpc.client import WireCount
from specdec.types import (
    DrawRule,
    Mode,
    Proposal,
    ProposeRequest,
    SamplingFilters,
    SessionPosition,
    Verification,
    VerifyRequest,
    carries_distributions,
)

_log = logging.getLogger(__name__)

#: Most rounds that a draft which keeps failing a session sits out before it is asked again.
MAX_ROUNDS_WITHOUT_DRAFT = 63

AnswerT = TypeVar("AnswerT")

_NO_PROPOSAL = Proposal(
    draft_token_ids=np.empty(0, np.uint32), supports=(), lost_mass=(), kv_len=0, num_cached_tokens=0, forward_s=0.0
)


@dataclass(frozen=True, slots=True)
class RoundSetting:
    """What all rounds of one request have in common."""

    session_id: str
    epoch: int
    turn: int
    output_start: int
    filters: SamplingFilters
    seed: int
    mode: Mode
    num_logprobs: int | None
    vocabulary_size: int
    """The target's."""
    draft_timeout_s: float | None
    """The longest that a round waits for its draft; None: until the draft answers or dies."""

    @property
    def draw_rule(self) -> DrawRule:
        return DrawRule.COUPLED if self.mode in (Mode.COUPLED, Mode.OFF) else DrawRule.DISTRIBUTION

    @property
    def answers_choices(self) -> bool:
        """Whether the target answers with token choices instead of distributions."""
        return not carries_distributions(self.filters, self.draw_rule)


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
    """Why there was no draft token: off, paused, no_replica, draft_context, late, empty, or an error's reason; "" where
    there was one."""


class _DraftAnswer(NamedTuple):
    proposal: Proposal = _NO_PROPOSAL
    replica: DraftReplica | None = None
    wait_s: float = 0.0
    missing_cause: str = ""
    num_asked: int = 0
    """Draft tokens asked for, 0 where no replica was asked."""


class _TargetAnswer(NamedTuple):
    replica: TargetReplica
    verification: Verification
    wait_s: float


class RoundRunner:
    """Runs the rounds of one request."""

    def __init__(
        self,
        setting: RoundSetting,
        tokens: SessionTokens,
        replicas: SessionReplicas,
        gamma: GammaChooser,
        draft_clock: DraftClock,
    ) -> None:
        """
        Args:
            setting: of the request.
            tokens: shared with the caller, who extends it by what it commits of each round.
            replicas: the session's.
            gamma: the request's.
            draft_clock: of the session's draft pool.
        """
        self._setting = setting
        self._tokens = tokens
        self._replicas = replicas
        self._gamma = gamma
        self._draft_clock = draft_clock
        self._asked_draft_at = 0.0
        self._failures_in_a_row = 0
        self._rounds_without_draft = 0
        self._last_answer: tuple[TargetReplica, int, int] | None = None
        """Whose it was, and what that replica had answered by then: rounds and positions."""

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
        # A round emits at most gamma + 1 tokens.
        gamma = self._gamma.choose(remaining - 1)

        wire = WireCount()

        draft = await self._propose(round_id, gamma, wire)

        target = await self._verify(round_id, draft.proposal, wire)

        decision = self._decide(draft.proposal, target.verification, committed_len)

        self._learn(draft, target, committed_len, decision.num_accepted)
        return RoundOutcome(
            token_ids=decision.token_ids,
            provenance=trace_tokens(decision, draft.proposal.supports, target.verification, self._replicas.draft_pool),
            num_draft_tokens=len(draft.proposal.draft_token_ids),
            num_accepted=decision.num_accepted,
            draft_s=draft.wait_s,
            verify_s=target.wait_s,
            wire_bytes=wire.num_bytes,
            num_cached_tokens=target.verification.num_cached_tokens,
            draft_pool=self._replicas.draft_pool,
            target_only_cause=draft.missing_cause,
        )

    async def _propose(self, round_id: int, gamma: int, wire: WireCount) -> _DraftAnswer:
        """Asks the draft. Whatever goes wrong, the answer is an empty proposal."""
        if gamma < 1:
            return _DraftAnswer(missing_cause="off")
        if self._rounds_without_draft > 0:
            self._rounds_without_draft -= 1
            return _DraftAnswer(missing_cause="paused")
        replica = self._replicas.draft()
        if replica is None:
            return _DraftAnswer(missing_cause="no_replica")
        gamma = min(gamma, *self._draft_limits(replica))
        if gamma < 1:
            return _DraftAnswer(missing_cause="draft_context")
        began = time.perf_counter()
        try:
            request = partial(self._request_draft, replica, gamma, wire)
            proposal = await self._ask(replica, round_id, request)
            check_proposal(
                proposal,
                gamma=gamma,
                with_supports=not self._setting.answers_choices,
                vocabulary_size=self._setting.vocabulary_size,
            )
        except (SpecdecError, TimeoutError) as error:
            cause = self._note_missing_draft(replica, error)
            return _DraftAnswer(wait_s=time.perf_counter() - began, missing_cause=cause, num_asked=gamma)
        replica.lateness.forgive()
        self._failures_in_a_row = 0
        wait_s = time.perf_counter() - began
        self._draft_clock.observe(gamma, len(self._tokens) - proposal.num_cached_tokens, wait_s)
        return _DraftAnswer(
            proposal=proposal,
            replica=replica,
            wait_s=wait_s,
            missing_cause="" if len(proposal.draft_token_ids) else "empty",
            num_asked=gamma,
        )

    def _request_draft(
        self, replica: DraftReplica, gamma: int, wire: WireCount, position: SessionPosition
    ) -> Awaitable[Proposal]:
        """Sends the request, to be answered within a deadline that fits what is asked."""
        self._asked_draft_at = asyncio.get_running_loop().time()
        replica.lateness.note_asked()
        deadline_s = None
        if self._setting.draft_timeout_s is not None:
            # All that is sent has to be run, unless a prefix of it is there from another session. Nobody waits for that
            # where a hung replica is tried again: its answer brings it back, however late.
            num_unseen = 0 if replica.lateness.is_marked else len(position.token_ids)
            expected_s = self._draft_clock.deadline_s(gamma, num_unseen) * replica.lateness.slack
            deadline_s = self._asked_draft_at + min(expected_s, self._setting.draft_timeout_s)
        request = ProposeRequest(position, gamma)
        return replica.link.propose(request, wire, model=replica.model, deadline_s=deadline_s)

    async def _verify(self, round_id: int, proposal: Proposal, wire: WireCount) -> _TargetAnswer:
        """Asks the session's target replica, then others while there are any."""
        began = time.perf_counter()
        failed: list[TargetReplica] = []
        num_rows = len(proposal.draft_token_ids) + 1
        while True:
            replica = self._replicas.target(failed)
            try:
                verification = await self._ask(
                    replica,
                    round_id,
                    lambda position, link=replica.link: link.verify(
                        self._verify_request(position, proposal), wire, model=self._replicas.target_fingerprint
                    ),
                )
                check_verification(verification, replica.address, vocabulary_size=self._setting.vocabulary_size)
                replica.num_answered += 1
                replica.num_rows += num_rows
                return _TargetAnswer(replica, verification, time.perf_counter() - began)
            # Internal too: a device that failed once tends to go on failing, and another replica may serve.
            except SpecdecError as failure:
                error = target_fault(failure, replica.address)
                if isinstance(error, StaleEpoch):
                    raise
                _log.warning("target replica %s did not verify: %s", replica.address, error)
                if error.reason == "REPLICA_UNAVAILABLE":
                    replica.fail(error)
                self._replicas.learn(replica, 0)
                failed.append(replica)
                if not self._replicas.has_target(failed):
                    if isinstance(error, KvMiss):
                        raise Unavailable(f"target replica {replica.address} lost the session twice") from error
                    if error is failure:
                        raise
                    raise error from failure

    def _verify_request(self, position: SessionPosition, proposal: Proposal) -> VerifyRequest:
        return VerifyRequest(
            position=position,
            draft_token_ids=proposal.draft_token_ids,
            support_ids=pack_supports(proposal.draft_token_ids.tolist(), proposal.supports).ids,
            num_logprobs=self._setting.num_logprobs,
        )

    def _learn(self, draft: _DraftAnswer, target: _TargetAnswer, committed_len: int, num_accepted: int) -> None:
        """Notes what the round showed about replicas and acceptance."""
        # KV beyond the accepted tokens is of tokens that are not the session's. The final token is in no KV yet, and
        # the draft lacks its own last token too, which kv_len tells.
        agreed_len = committed_len + num_accepted
        self._replicas.learn(target.replica, min(target.verification.kv_len, agreed_len))
        if draft.replica is not None:
            self._replicas.learn(draft.replica, min(draft.proposal.kv_len, agreed_len))
        drafted, verified = draft.proposal, target.verification
        num_others, num_other_rows = self._others_since(target.replica, len(drafted.draft_token_ids) + 1)
        self._gamma.observe(
            RoundTimes(
                num_draft_tokens=len(drafted.draft_token_ids),
                num_accepted=num_accepted,
                draft_s=draft.wait_s if draft.replica is not None else 0.0,
                verify_s=target.wait_s,
                verify_forward_s=verified.forward_s,
                num_prefilled=committed_len - verified.num_cached_tokens,
                num_draft_prefilled=committed_len - drafted.num_cached_tokens if draft.replica is not None else 0,
                committed_len=committed_len,
                # A draft that hung says nothing about the others of its pool.
                num_asked=draft.num_asked if draft.replica is not None else 0,
                step_tokens=verified.step_tokens,
                num_others=num_others,
                num_other_rows=num_other_rows,
            )
        )

    def _others_since(self, replica: TargetReplica, num_rows: int) -> tuple[int, int]:
        """Rounds, and positions in them, that a replica answered for others since its last answer here; none at first.

        Args:
            replica: has just answered.
            num_rows: positions of that answer.
        """
        before, self._last_answer = self._last_answer, (replica, replica.num_answered, replica.num_rows)
        if before is None or before[0] is not replica:
            return 0, 0
        return replica.num_answered - before[1] - 1, replica.num_rows - before[2] - num_rows

    async def _ask(
        self, replica: Replica[Any], round_id: int, send: Callable[[SessionPosition], Awaitable[AnswerT]]
    ) -> AnswerT:
        """Sends what the replica lacks, and once more if it lacks more than we thought.

        Raises:
            KvMiss: it lacked tokens twice.
        """
        committed_len = len(self._tokens)
        try:
            return await send(self._position(round_id, self._replicas.start_for(replica, committed_len)))
        except KvMiss as miss:
            self._replicas.learn(replica, miss.have)
            return await send(self._position(round_id, self._replicas.start_for(replica, committed_len)))

    def _position(self, round_id: int, start: int) -> SessionPosition:
        setting = self._setting
        return SessionPosition(
            session_id=setting.session_id,
            epoch=setting.epoch,
            round_id=round_id,
            start=start,
            prefix_hash=self._tokens.prefix_hash(start),
            token_ids=self._tokens.tail(start),
            filters=setting.filters,
            seed=setting.seed,
            turn=setting.turn,
            output_start=setting.output_start,
            draw_rule=setting.draw_rule,
        )

    def _decide(self, proposal: Proposal, verification: Verification, committed_len: int) -> Decision:
        draft_token_ids = proposal.draft_token_ids.tolist()
        if self._setting.answers_choices:
            return verify_choices(draft_token_ids, verification.choice_token_ids, verification.choice_probabilities)
        key = DrawKey(self._setting.seed, self._setting.turn, committed_len)
        verify = verify_block if self._setting.mode is Mode.BLOCK else verify_rejection
        return verify(draft_token_ids, proposal.supports, verification.rows, key)

    def _draft_limits(self, replica: DraftReplica) -> tuple[int, int]:
        """Draft tokens the replica takes, and those that fit its own context (the last one needs no KV)."""
        if replica.info is None:
            return 0, 0
        return replica.info.max_gamma, replica.info.max_context_tokens - len(self._tokens) + 1

    def _note_missing_draft(self, replica: DraftReplica, error: BaseException) -> str:
        """Decides when the draft is asked again; returns the cause in a word."""
        cause = error.reason if isinstance(error, SpecdecError) else "late"
        _log.warning("draft replica %s gave no draft: %s", replica.address, error or cause)
        if cause == "REPLICA_UNAVAILABLE":
            replica.fail(error)
        self._replicas.forget_draft()
        if cause == "late" and replica.lateness.note_late(self._asked_draft_at, replica.link.heard_at):
            return cause  # nobody asks it until it is heard of; the next round may have another
        # Each failure costs the client its wait, so where they go on the session asks less and less often.
        self._failures_in_a_row += 1
        self._rounds_without_draft = min(2 ** (self._failures_in_a_row - 1) - 1, MAX_ROUNDS_WITHOUT_DRAFT)
        return cause
