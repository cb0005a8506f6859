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
from coordinator.round.answers import check_verification, ends_the_request, lost_adapter, target_fault
from coordinator.round.draft_calls import Draft
from coordinator.round.session_calls import SessionCalls
from coordinator.round.setting import RoundSetting
from specdec.contract.errors import (
    ConstraintMiss,
    Internal,
    KvMiss,
    ResourceExhausted,
    SpecdecError,
    StaleEpoch,
    Unavailable,
)
from specdec.contract.types import RunLimit, SessionPosition, Verification, VerifyRequest
from specdec.core.packed import pack_supports
from specdec.rpc.open_calls import WireStats
from specdec.rpc.open_run import OpenRun
from specdec.structured.grammar import field_of

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
    is_step_of_run: bool = False
    """True for every step of a run but the first, which may run a prompt."""


class TargetCalls:
    """The target calls of one request. Only one round may use it at a time."""

    def __init__(self, setting: RoundSetting, replicas: SessionReplicas, calls: SessionCalls) -> None:
        self._setting = setting
        self._replicas = replicas
        self._calls = calls
        self._last_replica: TargetReplica | None = None
        self._run: OpenRun | None = None
        self._run_wire = WireStats()
        self._until = 0
        """Limit of the open run."""
        self._heard_s = 0.0
        """Time at which the last step of a run came, by `time.monotonic`."""
        self._step_s = 0.0
        """Seconds between the last two steps of a run."""

    @property
    def is_in_run(self) -> bool:
        """True while the target goes on by itself: the next verification is the run's next step."""
        return self._run is not None

    def renew(self, until: int, committed_len: int) -> None:
        """Raise the limit of the open run, unless its replica drains; a limit that is not larger has no effect."""
        if self._run is not None and until > self._until and self._last_replica and self._last_replica.takes_sessions:
            self._until = until
            self._run.renew(until, committed_len)

    def close(self) -> None:
        """Leave the open run, if there is one."""
        if self._run is not None:
            self._run.close()
            self._run = None

    async def verify(self, round_id: int, draft: Draft, wire: WireStats, until: int = 0) -> TargetAnswer:
        """Call the session's target replica, then others; wait if none can be reached or none has KV blocks.

        Args:
            round_id: id of the round.
            draft: what to verify, or to draft and verify.
            wire: counts the bytes of the calls.
            until: limit of the run that begins if there is nothing to verify; see `RunLimit`.

        Raises: as `RoundRunner.run`.
        """
        self._until = self._until if self.is_in_run else until
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
        failed = self._unfit_targets()
        while True:
            is_step_of_run = self.is_in_run and self._last_replica is not None
            replica = (
                self._last_replica if is_step_of_run and self._last_replica else self._replicas.choose_target(failed)
            )
            try:
                if is_step_of_run:
                    verification = await self._calls.next_step(partial(self._next_step, wire))
                else:
                    verification = await self._calls.call(replica, round_id, partial(self._send, replica, draft, wire))
                self._check(verification, replica, draft)
            # Internal too: a device that failed once tends to fail again, and another replica may serve.
            except SpecdecError as failure:
                self.close()
                failed.append(replica)
                self._note_failure(replica, failure, failed)
            else:
                is_same_replica = replica is self._last_replica
                self._last_replica = replica
                # Steps that came while the generation was busy were not waited for, so their own times count.
                wait_s = self._step_s if is_step_of_run else time.perf_counter() - began
                return TargetAnswer(replica, verification, wait_s, is_same_replica, is_step_of_run)

    def _unfit_targets(self) -> list[TargetReplica]:
        """Return the targets that would ignore the request's constraint."""
        if self._setting.constraint is None:
            return []
        return [replica for replica in self._replicas.targets() if not replica.follows_constraints]

    def _check(self, verification: Verification, replica: TargetReplica, draft: Draft) -> None:
        check_verification(
            verification,
            replica.address,
            vocabulary_size=self._setting.vocabulary_size,
            local=draft.local,
            with_supports=not self._setting.answers_choices,
            key=self._calls.draw_key,
        )

    async def _next_step(self, wire: WireStats) -> Verification:
        """Return the next step of the open run."""
        assert self._run is not None
        try:
            verification: Verification = await self._run.next()
        finally:
            wire.num_bytes += self._run_wire.num_bytes
            wire.sent_s, wire.heard_s = self._run_wire.sent_s, self._run_wire.heard_s
            self._run_wire.num_bytes = 0
        self._heard_s, self._step_s = self._run.heard_s, self._run.heard_s - self._heard_s
        if self._run.has_ended:
            self._run = None
        if verification.kv_len != self._calls.committed_len:
            raise Internal(
                f"a step of a run was answered at {verification.kv_len} tokens of the session, expected "
                f"{self._calls.committed_len}"
            )
        return verification

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
        if not draft.run_portion or replica.info is None or replica.info.max_run < 2:
            return replica.link.verify(request, wire, model=self._replicas.target_fingerprint)
        request.run = RunLimit(max(self._until, position.committed_len + 1), self._setting.end_token_ids)
        self._run_wire = WireStats()
        self._run = replica.link.open_run(request, self._run_wire, model=self._replicas.target_fingerprint)
        return self._next_step(wire)

    def _note_failure(self, replica: TargetReplica, failure: SpecdecError, failed: list[TargetReplica]) -> None:
        """Return if another replica may serve; raise the round's error if none can."""
        error = target_fault(failure, replica.address)
        if ends_the_request(error) and self._setting.constraint is not None:
            failure.field = field_of(self._setting.constraint)  # a target's answer does not carry it
            raise failure
        if isinstance(error, StaleEpoch):
            raise failure
        _log.warning("target replica %s failed to verify: %s", replica.address, error)
        replica.note_failure(error)
        if lost_adapter(failure):
            replica.on_doubt()
        elif error.reason == "REPLICA_UNAVAILABLE":
            replica.fail(error)
        elif error.reason == "DRAINING":
            replica.note_draining()
        self._replicas.learn(replica, 0)
        if self._replicas.has_target(failed):
            return
        if isinstance(error, KvMiss | ConstraintMiss):
            raise Unavailable(f"target replica {replica.address} lost the session twice") from error
        if error is failure:
            raise failure
        raise error from failure
