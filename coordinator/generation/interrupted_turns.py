"""Turns that an error has ended, until they are resumed or count as failed.

An error reaches the client, which may resume the turn from the log, here or at another coordinator. Such a turn has not
failed. So a turn counts as failed only if it is not resumed within `recovery_s`: a start of the same request here is
noted at once, and one elsewhere is seen in the session's record when the time is over.
"""

from __future__ import annotations

import asyncio
import logging

from coordinator.requests import GenerationIdentity
from specdec.contract.errors import SpecdecError
from specdec.contract.tenant import SessionKey
from specdec.observability.coordinator_metrics import CoordinatorMetrics
from specdec.state.store import SessionRecord, SessionStore

#: Time in which a turn must be resumed. The SDK tries for about this long.
DEFAULT_RECOVERY_S = 30.0

_log = logging.getLogger(__name__)


class InterruptedTurns:
    """The interrupted turns of one coordinator. Used from one event loop."""

    def __init__(
        self, store: SessionStore, metrics: CoordinatorMetrics, recovery_s: float = DEFAULT_RECOVERY_S
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._recovery_s = recovery_s
        self._open: dict[tuple[SessionKey, str], asyncio.Task[None]] = {}

    def note(self, key: SessionKey, identity: GenerationIdentity, reason: str) -> None:
        """Note a turn that an error of this reason has ended."""
        self._metrics.observe_interrupted(reason)
        settling = asyncio.create_task(self._settle(key, identity, reason), name="interrupted turn")
        self._open[key, identity.request_id] = settling

    def note_started(self, key: SessionKey, request_id: str) -> None:
        """Note that a turn runs here, for the first time or again."""
        task = self._open.pop((key, request_id), None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop waiting. Turns that are still open are neither resumed nor failed. Idempotent."""
        tasks, self._open = list(self._open.values()), {}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _settle(self, key: SessionKey, identity: GenerationIdentity, reason: str) -> None:
        await asyncio.sleep(self._recovery_s)
        try:
            record = await self._store.of_tenant(key.tenant).load(key.session_id)
        except SpecdecError as error:
            _log.warning("cannot see whether an interrupted turn was resumed: %s", error)
            record = None
        if record is None or not _has_continued(record, identity):
            self._metrics.observe_failed(reason)
        self._open.pop((key, identity.request_id), None)


def _has_continued(record: SessionRecord, identity: GenerationIdentity) -> bool:
    """Return whether the turn runs or has finished elsewhere, or the session has gone on to a later turn."""
    stored = record.request
    if stored is None:
        return False
    if stored.request_id != identity.request_id:
        return stored.turn >= identity.turn
    return record.status == "running" or stored.finish_reason is not None
