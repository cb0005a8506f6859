"""Remembers the log tail of each session served here, and appends it again if the store lost its latest writes.

A store that restarts after a crash may hold a session as it was some rounds ago. The coordinator that wrote those
rounds still has them, and the epoch shows that no other coordinator has written since, because an epoch never falls
(docs/protocol.md section 8). `generation_service` reports the end of each generation, and asks for a repair before it
uses a session again; `publisher` repairs the log of a generation that runs. A session that is gone altogether is not
restored, since it may have been deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np

from coordinator.generation.request_log import encode_stats, record_of
from coordinator.generation.session_leases import Leases
from coordinator.generation.turn import Turn
from coordinator.requests import RequestStats
from specdec.contract.errors import SessionLost, SpecdecError
from specdec.contract.tenant import SessionKey
from specdec.contract.types import FinishReason, TokenIds
from specdec.state.store import Lease, RequestRecord, SessionRecord, SessionStore

#: Limits on remembered sessions and on tokens of each. A store that syncs its log every second cannot lose more.
MAX_SESSIONS = 4096
MAX_TAIL_TOKENS = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogTail:
    """The last committed tokens of a session, and the request that wrote them."""

    lease: Lease
    request: RequestRecord
    """The session's last request, finished or unfinished."""
    base: int
    """Position of `token_ids[0]` in the session."""
    token_ids: TokenIds

    @property
    def end(self) -> int:
        return self.base + len(self.token_ids)

    def is_whole_in(self, record: SessionRecord) -> bool:
        """Return whether the store still holds everything that was committed."""
        stored = record.request
        return (
            stored is not None
            and stored.request_id == self.request.request_id
            and (stored.finish_reason is not None or self.request.finish_reason is None)
            and record.num_tokens >= self.end
        )


class LogRepair:
    """Log tails by session. Used from one event loop; a session is used by one admission at a time."""

    def __init__(self, store: SessionStore, leases: Leases) -> None:
        self._store = store
        self._leases = leases
        self._tails: OrderedDict[SessionKey, LogTail] = OrderedDict()
        self._repairing: dict[SessionKey, asyncio.Task[None]] = {}

    def remember(self, turn: Turn, finish_reason: FinishReason | None, stats: RequestStats, num_shown: int) -> None:
        """Remember the end of a turn of which `num_shown` output tokens were committed and shown."""
        request = replace(record_of(turn.identity), finish_reason=finish_reason, stats_json=encode_stats(stats))
        end = turn.identity.output_start + num_shown
        base = max(0, end - MAX_TAIL_TOKENS)
        token_ids = turn.tokens.tail(base)[: end - base]
        key = turn.lease.key
        self._tails.pop(key, None)
        self._tails[key] = LogTail(turn.lease, request, base, token_ids)
        if len(self._tails) > MAX_SESSIONS:
            self._tails.popitem(last=False)

    def forget(self, key: SessionKey) -> None:
        self._tails.pop(key, None)

    async def repair(self, key: SessionKey, record: SessionRecord | None) -> SessionRecord | None:
        """Return a session's record, after appending to the log what the store has lost of it.

        A repair that has started completes even when its caller is cancelled. Otherwise the lease would be given back
        too early, and the session would look as if another coordinator had written it since.

        Args:
            key: a session that no generation here uses.
            record: record of the session as just loaded.

        Raises:
            SessionLost: the store lost more tokens than are remembered.
            SessionBusy: another owner holds the session.
        """
        if (repairing := self._repairing.get(key)) is not None:
            await asyncio.wait([repairing])
            record = await self._load(key)
        tail = self._tails.get(key)
        if tail is None:
            return record
        if record is None or record.epoch > tail.lease.epoch:  # gone, or written by another coordinator since
            self.forget(key)
            return record
        if tail.is_whole_in(record):
            return replace(record, was_left=True)
        lost = await self._missing_of(tail, record)
        task = asyncio.create_task(self._put_back(tail, record, lost))
        self._repairing[key] = task
        task.add_done_callback(lambda _: self._repairing.pop(key).cancelled() or task.exception())
        await asyncio.shield(task)
        return await self._load(key)

    async def _load(self, key: SessionKey) -> SessionRecord | None:
        return await self._store.of_tenant(key.tenant).load(key.session_id)

    async def _put_back(self, tail: LogTail, record: SessionRecord, lost: TokenIds) -> None:
        key = tail.lease.key
        # The record may name a lease of this process although no generation uses the session: the lease was given
        # back, and the store has lost that write too.
        owner = record.owner if self._leases.is_ours(record.owner) else ""
        lease = await self._leases.acquire(key, create=False, owner=owner)
        self._tails[key] = replace(tail, lease=lease)
        is_repaired = False
        try:
            is_repaired = await self._append(lease, record, tail.request, lost)
        finally:
            await self._release(lease, left=is_repaired or lease.was_left)

    async def _missing_of(self, tail: LogTail, record: SessionRecord) -> TokenIds:
        """Return the tokens that the store lost. Raises SessionLost when the tail does not continue the stored ones."""
        is_same_turn = record.request is not None and record.request.request_id == tail.request.request_id
        stored = await self._store.of_tenant(tail.lease.tenant).read_tokens(record.session_id, tail.base)
        stored = stored[: max(0, record.num_tokens - tail.base)]
        is_prefix = record.num_tokens >= tail.base and np.array_equal(stored, tail.token_ids[: len(stored)])
        # A record of an older turn may hold other tokens before `tail.base`: a later turn may have cut them away.
        if not is_prefix or (tail.base > 0 and not is_same_turn):
            raise SessionLost(
                f"the store lost the end of session {record.session_id}: {record.num_tokens} of {tail.end} tokens are "
                "left"
            )
        return tail.token_ids[len(stored) :]

    async def _append(self, lease: Lease, record: SessionRecord, request: RequestRecord, lost: TokenIds) -> bool:
        """Append the lost tokens unless the session has changed since `record`; return whether they were appended."""
        held = await self._load(lease.key)
        if held is None or (held.num_tokens, held.request) != (record.num_tokens, record.request):
            self.forget(lease.key)
            return False
        _log.warning("appending tokens that the store lost: session=%s num_tokens=%d", lease.session_id, len(lost))
        await self._store.begin_request(lease, request, keep=record.num_tokens, token_ids=lost)
        return True

    async def _release(self, lease: Lease, *, left: bool) -> None:
        try:
            await self._store.release(lease, left=left)
        except SpecdecError as error:
            _log.warning("release after a log repair failed: session=%s: %s", lease.session_id, error)
