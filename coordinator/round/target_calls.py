"""The calls of one request to its target replica, and to another one if that fails.

`SessionCalls` sends the request to the target service (`target_service/servicer`). The verification goes back to the
`runner`, which decides the round. `replicas/placement` chooses the replica; if none can be reached, the call waits
for one (`replicas/target_wait`). If all of them lack KV blocks, or have too many prompts before it, the call is
repeated for a while. The request keeps its slot meanwhile, so that fewer requests are admitted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from functools import partial
from typing import NamedTuple

from coordinator.replicas.placement import SessionReplicas
from coordinator.replicas.replica import TargetReplica
from coordinator.round.answers import check_verification, target_fault
from coordinator.round.draft_calls import Draft
from coordinator.round.session_calls import SessionCalls
from coordinator.round.setting import RoundSetting
from specdec.contract.errors import KvMiss, ResourceExhausted, SpecdecError, StaleEpoch, Unavailable
from specdec.contract.types import SessionPosition, Verification, VerifyRequest
from specdec.core.packed import pack_supports
from specdec.rpc.open_calls import WireStats

#: Pause before a target that lacked KV blocks is called again, at most; the target may name a shorter one.
MAX_KV_PAUSE_S = 1.0

#: Reasons for which a target refuses a request without output, and after which it may take the same request.
_MAY_PASS = ("KV_EXHAUSTED", "QUEUE_FULL")

#: Pause after a target came back and failed again; it doubles each time.
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0

_log = logging.getLogger(__name__)


class TargetAnswer(NamedTuple):
    """A verification, and what it took."""

    replica: TargetReplica
    verification: Verification
    wait_s: float
    """Seconds from the first call to the answer, failed calls included, a wait for a lost target excluded."""
    is_same_replica: bool
    """True if this replica also answered this request's previous round. Otherwise its counts of other sessions'
    rounds since then mean nothing."""


class TargetCalls:
    """The target calls of one request. Only one round may use it at a time."""

    def __init__(self, setting: RoundSetting, replicas: SessionReplicas, calls: SessionCalls) -> None:
        self._setting = setting
        self._replicas = replicas
        self._calls = calls
        self._last_replica: TargetReplica | None = None

    async def verify(self, round_id: int, draft: Draft, wire: WireStats) -> TargetAnswer:
        """Call the session's target replica, then others; wait if none can be reached or none has KV blocks.

        Args:
            round_id: id of the round.
            draft: what to verify, or to draft and verify.
            wire: counts the bytes of the calls.

        Raises: as `RoundRunner.run`.
        """
        began_s = time.monotonic()
        while True:
            try:
                return await self._verify_reachable(round_id, draft, wire)
            except ResourceExhausted as error:
                pause_s = min(error.retry_after_s or MAX_KV_PAUSE_S, MAX_KV_PAUSE_S)
                left_s = began_s + self._max_kv_wait_s() - time.monotonic()
                if error.reason not in _MAY_PASS or error.retry_after_s is None or left_s < pause_s:
                    raise
            await asyncio.sleep(pause_s)

    def _max_kv_wait_s(self) -> float:
        """Return how long to wait for KV blocks: longer once a reader may hold tokens."""
        return self._replicas.target_wait_s if self._calls.has_output else self._setting.kv_wait_s

    async def _verify_reachable(self, round_id: int, draft: Draft, wire: WireStats) -> TargetAnswer:
        try:
            return await self._verify(round_id, draft, wire)
        except Unavailable:
            lost_at_s, pause_s = time.monotonic(), FIRST_PAUSE_S
            if not self._replicas.may_wait(lost_at_s):
                raise
        while True:
            await self._replicas.wait_for_target(lost_at_s)
            try:
                return await self._verify(round_id, draft, wire)
            except Unavailable:
                if not self._replicas.may_wait(lost_at_s):
                    raise
            # The replica describes itself and fails its calls: each further attempt comes later.
            await asyncio.sleep(pause_s)
            pause_s = min(2.0 * pause_s, MAX_PAUSE_S)

    async def _verify(self, round_id: int, draft: Draft, wire: WireStats) -> TargetAnswer:
        began = time.perf_counter()
        failed: list[TargetReplica] = []
        while True:
            replica = self._replicas.choose_target(failed)
            try:
                verification = await self._calls.call(replica, round_id, partial(self._send, replica, draft, wire))
                self._check(verification, replica, draft)
            # Internal too: a device that failed once tends to fail again, and another replica may serve.
            except SpecdecError as failure:
                failed.append(replica)
                self._note_failure(replica, failure, failed)
            else:
                is_same_replica = replica is self._last_replica
                self._last_replica = replica
                return TargetAnswer(replica, verification, time.perf_counter() - began, is_same_replica)

    def _check(self, verification: Verification, replica: TargetReplica, draft: Draft) -> None:
        check_verification(
            verification,
            replica.address,
            vocabulary_size=self._setting.vocabulary_size,
            local=draft.local,
            with_supports=not self._setting.answers_choices,
            key=self._calls.draw_key,
        )

    def _send(
        self, replica: TargetReplica, draft: Draft, wire: WireStats, position: SessionPosition
    ) -> Awaitable[Verification]:
        proposal = draft.proposal
        request = VerifyRequest(
            position=position,
            draft_token_ids=proposal.draft_token_ids,
            support_ids=pack_supports(proposal.draft_token_ids.tolist(), proposal.supports).ids,
            num_logprobs=self._setting.num_logprobs,
            local_draft=draft.local_for(replica),
        )
        return replica.link.verify(request, wire, model=self._replicas.target_fingerprint)

    def _note_failure(self, replica: TargetReplica, failure: SpecdecError, failed: list[TargetReplica]) -> None:
        """Return if another replica may serve; raise the round's error if none can."""
        error = target_fault(failure, replica.address)
        if isinstance(error, StaleEpoch):
            raise failure
        _log.warning("target replica %s failed to verify: %s", replica.address, error)
        replica.note_failure(error)
        if error.reason == "REPLICA_UNAVAILABLE":
            replica.fail(error)
        elif error.reason == "DRAINING":
            replica.note_draining()
        self._replicas.learn(replica, 0)
        if self._replicas.has_target(failed):
            return
        if isinstance(error, KvMiss):
            raise Unavailable(f"target replica {replica.address} lost the session twice") from error
        if error is failure:
            raise failure
        raise error from failure
