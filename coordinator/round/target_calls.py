"""A round's call to its target replica, and to another one where that fails.

The call goes through `session_calls` to the target service (`target_service/servicer`); its verification goes back to
`runner`, which decides. Not here: which replica it is (`replicas/placement`), what an answer must be (`answers`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from functools import partial
from typing import NamedTuple

from coordinator.replicas.placement import SessionReplicas
from coordinator.replicas.replica import TargetReplica
from coordinator.round.answers import check_proposal, check_verification, target_fault
from coordinator.round.session_calls import SessionCalls
from coordinator.round.setting import RoundSetting
from specdec.core.packed import pack_supports
from specdec.errors import KvMiss, SpecdecError, StaleEpoch, Unavailable
from specdec.rpc.calls import WireStats
from specdec.types import LocalDraft, Proposal, SessionPosition, Verification, VerifyRequest

_log = logging.getLogger(__name__)


class TargetAnswer(NamedTuple):
    """A verification and what it took."""

    replica: TargetReplica
    verification: Verification
    wait_s: float
    """For all replicas that were asked."""
    is_same_replica: bool
    """Whether it answered this request's round before, too: else what it tells of others since then means nothing."""


class TargetCalls:
    """The target calls of one request's rounds. One round at a time."""

    def __init__(self, setting: RoundSetting, replicas: SessionReplicas, calls: SessionCalls) -> None:
        self._setting = setting
        self._replicas = replicas
        self._calls = calls
        self._last_replica: TargetReplica | None = None

    async def verify(
        self, round_id: int, proposal: Proposal, wire: WireStats, local: LocalDraft | None = None
    ) -> TargetAnswer:
        """Asks the session's target replica, then others while there are any.

        Args:
            round_id: of the round.
            proposal: of the draft; empty in a target-only step.
            wire: counts the calls' bytes.
            local: what a target that can is to draft with by itself, where there is no proposal.

        Raises: as `RoundRunner.run`.
        """
        began = time.perf_counter()
        failed: list[TargetReplica] = []
        while True:
            replica = self._replicas.choose_target(failed)
            try:
                send = partial(self._send, replica, proposal, wire, local)
                verification = await self._calls.ask(replica, round_id, send)
                self._check(verification, replica, local)
            # Internal too: a device that failed once tends to go on failing, and another replica may serve.
            except SpecdecError as failure:
                failed.append(replica)
                self._note_failure(replica, failure, failed)
            else:
                is_same_replica = replica is self._last_replica
                self._last_replica = replica
                return TargetAnswer(replica, verification, time.perf_counter() - began, is_same_replica)

    def _check(self, verification: Verification, replica: TargetReplica, local: LocalDraft | None) -> None:
        """Raises Internal: it is no answer."""
        setting = self._setting
        check_verification(verification, replica.address, vocabulary_size=setting.vocabulary_size)
        if local is not None and verification.drafted is not None:
            check_proposal(
                verification.drafted,
                gamma=local.gamma,
                with_supports=not setting.answers_choices,
                vocabulary_size=setting.vocabulary_size,
            )

    def _send(
        self,
        replica: TargetReplica,
        proposal: Proposal,
        wire: WireStats,
        local: LocalDraft | None,
        position: SessionPosition,
    ) -> Awaitable[Verification]:
        can_draft = local is not None and replica.info is not None and local.pool in replica.info.local_drafts
        request = VerifyRequest(
            position=position,
            draft_token_ids=proposal.draft_token_ids,
            support_ids=pack_supports(proposal.draft_token_ids.tolist(), proposal.supports).ids,
            num_logprobs=self._setting.num_logprobs,
            local_draft=local if can_draft else None,
        )
        return replica.link.verify(request, wire, model=self._replicas.target_fingerprint)

    def _note_failure(self, replica: TargetReplica, failure: SpecdecError, failed: list[TargetReplica]) -> None:
        """Returns where another replica may serve; raises what the failure means where none can."""
        error = target_fault(failure, replica.address)
        if isinstance(error, StaleEpoch):
            raise failure
        _log.warning("target replica %s did not verify: %s", replica.address, error)
        if error.reason == "REPLICA_UNAVAILABLE":
            replica.fail(error)
        self._replicas.learn(replica, 0)
        if self._replicas.has_target(failed):
            return
        if isinstance(error, KvMiss):
            raise Unavailable(f"target replica {replica.address} lost the session twice") from error
        if error is failure:
            raise failure
        raise error from failure
