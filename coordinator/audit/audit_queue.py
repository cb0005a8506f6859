"""The queue of rounds that are verified again in the background.

One round is audited at a time, and only while no call of this coordinator waits for its target. Runs go on meanwhile,
since they do not end by themselves. A round that finds no such moment is dropped and counted. No round waits for the
queue. `turn_audit` adds rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import secrets
from collections import deque
from itertools import count

from coordinator.audit.audited_round import AuditedRound, Result, Verdict
from coordinator.audit.distributions import DistributionCheck, check_choices
from coordinator.audit.target_pass import TargetPass, tolerance_of
from specdec.contract.errors import SpecdecError
from specdec.observability.audit import AuditMetrics

#: Largest number of waiting rounds; a further one is dropped.
MAX_WAITING = 16

#: Seconds that a round waits for its target to be idle.
MAX_WAIT_S = 5.0

#: Seconds after which an audit is given up.
AUDIT_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


class AuditQueue:
    """The queue. Used from one event loop."""

    def __init__(self, metrics: AuditMetrics, *, max_wait_s: float = MAX_WAIT_S) -> None:
        self._metrics = metrics
        self._max_wait_s = max_wait_s
        self._waiting: deque[AuditedRound] = deque()
        self._round_ended = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._session_ids = (f"audit-{secrets.token_hex(8)}-{index}" for index in count())

    def put(self, audited: AuditedRound) -> None:
        """Add a round to the queue, or drop it if the queue is full; return at once."""
        if len(self._waiting) >= MAX_WAITING:
            self._metrics.observe_dropped("queue_full")
            return
        self._waiting.append(audited)
        if self._worker is None or self._worker.done():
            # An own context: the lines of the log must not carry the session whose round came first.
            self._worker = asyncio.create_task(self._work(), name="audit", context=contextvars.Context())

    def note_round_ended(self) -> None:
        """Note that a live round has been answered, so that its target may be idle now."""
        self._round_ended.set()

    async def settle(self) -> None:
        """Wait until the queue is empty."""
        if self._worker is not None:
            await asyncio.wait([self._worker])

    async def close(self) -> None:
        """Drop the waiting rounds. Idempotent."""
        self._waiting.clear()
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker

    async def _work(self) -> None:
        while self._waiting:
            audited = self._waiting.popleft()
            try:
                if await self._has_room(audited):
                    self._note(audited, await self._audit(audited))
                else:
                    self._metrics.observe_dropped("busy")
            except (SpecdecError, TimeoutError) as error:
                _log.debug("an audit failed: %s", str(error) or "no answer in time")
                self._metrics.observe_dropped("failed")
            except Exception:
                _log.exception("an audit failed")
                self._metrics.observe_dropped("failed")

    async def _has_room(self, audited: AuditedRound) -> bool:
        """Wait until no live round waits for the target; return False if that takes too long."""
        replica = audited.replica
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._max_wait_s):
                while replica.takes_sessions and not replica.link.has_only_runs:
                    self._round_ended.clear()
                    await self._round_ended.wait()
        return replica.takes_sessions and replica.link.has_only_runs

    async def _audit(self, audited: AuditedRound) -> Verdict:
        target_pass = TargetPass(audited, next(self._session_ids))
        dtype = audited.replica.info.dtype if audited.replica.info else ""
        tolerance = tolerance_of(dtype, audited.setting.filters)
        try:
            async with asyncio.timeout(AUDIT_TIMEOUT_S):
                if audited.setting.answers_choices:
                    return await check_choices(audited, target_pass, tolerance)
                return await DistributionCheck(audited, target_pass, tolerance).run()
        finally:
            await target_pass.close()

    def _note(self, audited: AuditedRound, verdict: Verdict) -> None:
        self._metrics.observe_checked(audited.mode, verdict.result)
        if verdict.acceptance is not None:
            self._metrics.observe_acceptance(audited.mode, *verdict.acceptance)
        if verdict.result is Result.MISMATCH:
            _log.error(
                "audit mismatch",
                extra={
                    "tenant": audited.setting.tenant,
                    "session_id": audited.setting.session_id,
                    "request_id": audited.request_id,
                    "position": verdict.position,
                    "difference": verdict.difference,
                    "mode": audited.mode,
                    "target": audited.replica.address,
                },
            )
