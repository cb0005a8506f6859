"""The calls of one request to its draft replica: each has a deadline, and a draft that keeps failing is called less.

`SessionCalls` sends the request to the draft service (`draft_service/servicer`). The draft goes back through the
source (`draft_sources`) to the `runner`, which has the target verify it (`target_calls`). A late, dead or malformed
answer gives a draft without tokens, and the round becomes a target-only step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from coordinator.replicas.placement import SessionReplicas
from coordinator.replicas.replica import DraftReplica, TargetReplica
from coordinator.round.answers import check_proposal
from coordinator.round.draft_deadline import DraftDeadline
from coordinator.round.session_calls import SessionCalls
from coordinator.round.setting import RoundSetting
from specdec.contract.errors import SpecdecError
from specdec.contract.types import LocalDraft, Proposal, ProposeRequest, SessionPosition
from specdec.rpc.open_calls import CallTimeout, WireStats

#: Largest number of rounds that a session skips its draft after repeated failures.
MAX_ROUNDS_WITHOUT_DRAFT = 63

#: Number of tokens without a draft after which gamma is chosen again.
RUN_PORTION = 16

_NO_PROPOSAL = Proposal(
    draft_token_ids=np.empty(0, np.uint32), supports=(), lost_mass=(), kv_len=0, num_cached_tokens=0, forward_s=0.0
)

_log = logging.getLogger(__name__)


class Draft(NamedTuple):
    """The draft of one round, and what it cost to get."""

    proposal: Proposal = _NO_PROPOSAL
    replica: DraftReplica | None = None
    """Draft replica that answered; None after a failure and for drafts that no replica made."""
    wait_s: float = 0.0
    missing_cause: str = ""
    """Reason for a missing draft, as in `RoundOutcome.target_only_cause`."""
    num_requested: int = 0
    """Number of draft tokens requested. 0 if no replica answered: one hung replica says nothing about its pool."""
    pool: str = ""
    """Pool that made the draft, or that should have made it."""
    local: LocalDraft | None = None
    """Draft that the target is requested to make by itself, in the verification call."""
    verification_share_s: float = 0.0
    """Part of the wait for the verification that the target spent on the draft."""
    wire_bytes: int = 0
    """Bytes of the draft calls, failed ones included."""
    run_portion: int = 0
    """Number of tokens after which the source is asked again if it has no draft now; the target runs ahead meanwhile.
    0: each round asks."""
    sent_s: float = 0.0
    """Time at which the last call was sent, as in `WireStats`."""
    received_s: float = 0.0
    """Time at which the last answer was received, as in `WireStats`."""
    num_forced: int = 0
    """Number of leading tokens that the request's constraint forces; `pool` did not draft them."""

    def local_for(self, target: TargetReplica) -> LocalDraft | None:
        """Return the draft that this target is to make by itself, or None."""
        return self.local if self.local is not None and target.can_draft(self.local.pool) else None


class DraftCalls:
    """The draft calls of one request. Only one round may use it at a time."""

    def __init__(
        self,
        pool: str,
        setting: RoundSetting,
        replicas: SessionReplicas,
        calls: SessionCalls,
        deadline: DraftDeadline,
    ) -> None:
        """`pool` is the draft pool that the session is routed to, and `deadline` that pool's deadline."""
        self._pool = pool
        self._setting = setting
        self._replicas = replicas
        self._calls = calls
        self._deadline = deadline
        self._called_at = 0.0
        self._failures_in_a_row = 0
        self._rounds_to_skip = 0

    async def propose(self, round_id: int, gamma: int, committed_len: int, forced: Sequence[int] = ()) -> Draft:
        """Request draft tokens from the session's draft replica. Every failure gives a draft without tokens.

        Args:
            round_id: id of the round.
            gamma: number of draft tokens wanted; the replica's own limits may lower it.
            committed_len: number of committed tokens of the session.
            forced: tokens that follow the committed ones for certain; the draft follows them.
        """
        if gamma < 1:
            return Draft(missing_cause="off", pool=self._pool, run_portion=RUN_PORTION)
        if self._rounds_to_skip > 0:
            self._rounds_to_skip -= 1
            return Draft(missing_cause="paused", pool=self._pool)
        replica = self._replicas.choose_draft()
        if replica is None:
            return Draft(missing_cause="no_replica", pool=self._pool, run_portion=RUN_PORTION)
        prefix_len = committed_len + len(forced)
        gamma = min(gamma, *_draft_limits(replica, prefix_len))
        if gamma < 1:
            return Draft(missing_cause="draft_context", pool=self._pool)

        began = time.perf_counter()
        wire = WireStats()
        try:
            proposal = await self._calls.call(replica, round_id, partial(self._send, replica, gamma, wire), forced)
            check_proposal(
                proposal,
                gamma=gamma,
                with_supports=not self._setting.answers_choices,
                vocabulary_size=self._setting.vocabulary_size,
                key=self._calls.draw_key_after(len(forced)),
            )
        except (SpecdecError, TimeoutError) as error:
            cause = self._note_failure(replica, error)
            wait_s = time.perf_counter() - began
            return Draft(wait_s=wait_s, missing_cause=cause, pool=self._pool, wire_bytes=wire.num_bytes)
        replica.health.reset()
        self._failures_in_a_row = 0
        wait_s = time.perf_counter() - began
        self._deadline.observe(gamma, prefix_len - proposal.num_cached_tokens, wait_s)
        return Draft(
            proposal=proposal,
            replica=replica,
            wait_s=wait_s,
            missing_cause="" if len(proposal.draft_token_ids) else "empty",
            num_requested=gamma,
            pool=self._pool,
            wire_bytes=wire.num_bytes,
            sent_s=wire.sent_s,
            received_s=wire.heard_s,
        )

    def _send(
        self, replica: DraftReplica, gamma: int, wire: WireStats, position: SessionPosition
    ) -> Awaitable[Proposal]:
        """Send the request with a deadline that fits the number of draft tokens and of tokens to prefill."""
        self._called_at = asyncio.get_running_loop().time()
        replica.health.note_called()
        call_timeout = None
        if self._setting.draft_timeout_s is not None:
            # The replica has to run all tokens that are sent, unless another session left a prefix of them there.
            # A hung replica that is tried again gets no time for them: its answer brings it back, however late.
            num_unseen = 0 if replica.health.is_marked else len(position.token_ids)
            silence_s = self._deadline.deadline_s(gamma, num_unseen) * replica.health.slack
            call_timeout = CallTimeout(silence_s, self._setting.draft_timeout_s)
        request = ProposeRequest(position, gamma)
        return replica.link.propose(request, wire, model=replica.model, call_timeout=call_timeout)

    def _note_failure(self, replica: DraftReplica, error: BaseException) -> str:
        """Decide when the session calls its draft again; return the cause as one word."""
        cause = error.reason if isinstance(error, SpecdecError) else "late"
        # The metrics count late drafts, each of which costs one round; other failures need attention.
        level = logging.INFO if cause == "late" else logging.WARNING
        _log.log(level, "draft replica %s failed to draft: %s", replica.address, str(error) or cause)
        if isinstance(error, SpecdecError):
            replica.note_failure(error)
        if cause == "REPLICA_UNAVAILABLE":
            replica.fail(error)
        self._replicas.forget_draft()
        if cause == "late" and replica.health.note_late(self._called_at, replica.link.heard_at):
            return cause  # the replica is out of use until it answers; the next round may have another one
        # Each failure makes the client wait, so the session pauses longer after each further one.
        self._failures_in_a_row += 1
        self._rounds_to_skip = min(2 ** (self._failures_in_a_row - 1) - 1, MAX_ROUNDS_WITHOUT_DRAFT)
        return cause


def _draft_limits(replica: DraftReplica, committed_len: int) -> tuple[int, int]:
    """Return the replica's own limit of draft tokens, and how many fit its context (the last one needs no KV)."""
    if replica.info is None:
        return 0, 0
    return replica.info.max_gamma, replica.info.max_context_tokens - committed_len + 1
