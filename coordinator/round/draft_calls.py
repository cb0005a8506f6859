"""A round's call to its draft replica: asked within a deadline, and asked less often while it fails.

The call goes through `session_calls` to the draft service (`draft_service/servicer`); its draft tokens go back to
`runner`, which has them verified (`target_calls`). A late, dead or confused draft gives an empty proposal, which
makes the round a target-only step. Not here: how many tokens are asked for (`gamma`), how long a deadline is
(`draft_clock`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from functools import partial
from typing import NamedTuple

import numpy as np

from coordinator.replicas.placement import SessionReplicas
from coordinator.replicas.replica import DraftReplica, TargetReplica
from coordinator.round.answers import check_proposal
from coordinator.round.draft_deadline import DraftDeadline
from coordinator.round.session_calls import SessionCalls
from coordinator.round.setting import RoundSetting
from specdec.errors import SpecdecError
from specdec.rpc.calls import CallTimeout, WireStats
from specdec.types import LocalDraft, Proposal, ProposeRequest, SessionPosition, Verification

#: Most rounds that a draft which keeps failing a session sits out before it is asked again.
MAX_ROUNDS_WITHOUT_DRAFT = 63

_NO_PROPOSAL = Proposal(
    draft_token_ids=np.empty(0, np.uint32), supports=(), lost_mass=(), kv_len=0, num_cached_tokens=0, forward_s=0.0
)

_log = logging.getLogger(__name__)


class DraftAnswer(NamedTuple):
    """What a round has of its draft."""

    proposal: Proposal = _NO_PROPOSAL
    replica: DraftReplica | None = None
    """That answered."""
    wait_s: float = 0.0
    missing_cause: str = ""
    """Why there is no draft token, as `RoundOutcome.target_only_cause`."""
    num_asked: int = 0
    """Draft tokens asked for, 0 where no replica answered: one that hung says nothing about the others of its pool."""
    pool: str = ""
    """That gave it, or was to."""
    local: LocalDraft | None = None
    """What the target is asked to draft with by itself; there is no proposal yet."""

    def drafted_by(self, target: TargetReplica, verification: Verification, verify_s: float) -> DraftAnswer:
        """What a round has of its draft once `target`, asked to draft by itself, has answered after `verify_s`."""
        proposal = verification.drafted
        if self.local is None:
            return self
        if proposal is None:
            is_able = target.info is not None and self.local.pool in target.info.local_drafts
            return self._replace(missing_cause="not_drafted" if is_able else "no_replica")
        wait_s = min(max(0.0, proposal.forward_s), verify_s)  # what is no number is 0 here
        return self._replace(proposal=proposal, wait_s=wait_s, num_asked=self.local.gamma)


class DraftCalls:
    """The draft calls of one request's rounds. One round at a time."""

    def __init__(
        self, setting: RoundSetting, replicas: SessionReplicas, calls: SessionCalls, draft_clock: DraftDeadline
    ) -> None:
        self._setting = setting
        self._replicas = replicas
        self._calls = calls
        self._draft_clock = draft_clock
        self._asked_at = 0.0
        self._failures_in_a_row = 0
        self._rounds_to_sit_out = 0

    async def propose(self, round_id: int, gamma: int, committed_len: int, wire: WireStats) -> DraftAnswer:
        """Asks for draft tokens. Whatever goes wrong, the answer is an empty proposal.

        Args:
            round_id: of the round.
            gamma: draft tokens wanted; a replica may take fewer.
            committed_len: of the session.
            wire: counts the calls' bytes.
        """
        if gamma < 1:
            return DraftAnswer(missing_cause="off")
        if self._rounds_to_sit_out > 0:
            self._rounds_to_sit_out -= 1
            return DraftAnswer(missing_cause="paused")
        replica = self._replicas.choose_draft()
        if replica is None:
            return DraftAnswer(missing_cause="no_replica")
        gamma = min(gamma, *_draft_limits(replica, committed_len))
        if gamma < 1:
            return DraftAnswer(missing_cause="draft_context")

        began = time.perf_counter()
        try:
            proposal = await self._calls.ask(replica, round_id, partial(self._send, replica, gamma, wire))
            check_proposal(
                proposal,
                gamma=gamma,
                with_supports=not self._setting.answers_choices,
                vocabulary_size=self._setting.vocabulary_size,
            )
        except (SpecdecError, TimeoutError) as error:
            cause = self._note_failure(replica, error)
            return DraftAnswer(wait_s=time.perf_counter() - began, missing_cause=cause)
        replica.replica_health.reset()
        self._failures_in_a_row = 0
        wait_s = time.perf_counter() - began
        self._draft_clock.observe(gamma, committed_len - proposal.num_cached_tokens, wait_s)
        return DraftAnswer(
            proposal=proposal,
            replica=replica,
            wait_s=wait_s,
            missing_cause="" if len(proposal.draft_token_ids) else "empty",
            num_asked=gamma,
        )

    def _send(
        self, replica: DraftReplica, gamma: int, wire: WireStats, position: SessionPosition
    ) -> Awaitable[Proposal]:
        """Sends the request, to be answered within a deadline that fits what is asked."""
        self._asked_at = asyncio.get_running_loop().time()
        replica.replica_health.note_asked()
        call_timeout = None
        if self._setting.draft_timeout_s is not None:
            # All that is sent has to be run, unless a prefix of it is there from another session. Nobody waits for that
            # where a hung replica is tried again: its answer brings it back, however late.
            num_unseen = 0 if replica.replica_health.is_marked else len(position.token_ids)
            silence_s = self._draft_clock.deadline_s(gamma, num_unseen) * replica.replica_health.slack
            call_timeout = CallTimeout(silence_s, self._setting.draft_timeout_s)
        request = ProposeRequest(position, gamma)
        return replica.link.propose(request, wire, model=replica.model, call_timeout=call_timeout)

    def _note_failure(self, replica: DraftReplica, error: BaseException) -> str:
        """Decides when the draft is asked again; returns the cause in a word."""
        cause = error.reason if isinstance(error, SpecdecError) else "late"
        # A late draft costs one round and is counted in the metrics; anything else is worth a look.
        level = logging.INFO if cause == "late" else logging.WARNING
        _log.log(level, "draft replica %s gave no draft: %s", replica.address, str(error) or cause)
        if cause == "REPLICA_UNAVAILABLE":
            replica.fail(error)
        self._replicas.forget_draft()
        if cause == "late" and replica.replica_health.note_late(self._asked_at, replica.link.heard_at):
            return cause  # nobody asks it until it is heard of; the next round may have another
        # Each failure costs the client its wait, so where they go on the session asks less and less often.
        self._failures_in_a_row += 1
        self._rounds_to_sit_out = min(2 ** (self._failures_in_a_row - 1) - 1, MAX_ROUNDS_WITHOUT_DRAFT)
        return cause


def _draft_limits(replica: DraftReplica, committed_len: int) -> tuple[int, int]:
    """Draft tokens the replica takes, and those that fit its own context (the last one needs no KV)."""
    if replica.info is None:
        return 0, 0
    return replica.info.max_gamma, replica.info.max_context_tokens - committed_len + 1
