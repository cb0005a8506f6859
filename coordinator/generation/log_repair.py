"""What this coordinator last left in the sessions it served, to repair a store that lost its latest writes.

A store that comes back from a crash may hold a session as it was some rounds ago. Who wrote those rounds still knows
them, and that nobody wrote since: an epoch never falls (docs/protocol.md section 8). Not here: repairing under a
generation that runs (`publisher`), a session that is gone altogether, for it may have been deleted. Told of
every end of a generation, and asked before a session is used again, by `admission`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np

from coordinator.generation.leases import Leases
from coordinator.generation.request_log import encode_stats, record_of
from coordinator.requests import GenerationIdentity, RequestStats
from coordinator.round.tokens import SessionTokens
from specdec.errors import SessionLost, SpecdecError
from specdec.state.store import Lease, RequestRecord, SessionRecord, SessionStore
from specdec.types import FinishReason, TokenIds

#: Sessions remembered, and tokens of each: more than a store that syncs its log every second can lose.
MAX_SESSIONS = 4096
MAX_TAIL_TOKENS = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tail:
    """How a session was left: all of it is in the store, or was."""

    lease: Lease
    request: RequestRecord
    """The last one; finished, or left in the middle."""
    base: int
    """Position of `token_ids[0]` in the session."""
    token_ids: TokenIds

    @property
    def end(self) -> int:
        return self.base + len(self.token_ids)

    def is_whole_in(self, record: SessionRecord) -> bool:
        """Whether the store still holds what was left."""
        stored = record.request
        return (
            stored is not None
            and stored.request_id == self.request.request_id
            and (stored.finish_reason is not None or self.request.finish_reason is None)
            and record.num_tokens >= self.end
        )


class LogRepair:
    """Tails by session. Used from one event loop, a session by one admission at a time."""

    def __init__(self, store: SessionStore, leases: Leases) -> None:
        self._store = store
        self._leases = leases
        self._log_repair: OrderedDict[str, Tail] = OrderedDict()
        self._repairing: dict[str, asyncio.Task[None]] = {}

    def remember(
        self,
        lease: Lease,
        identity: GenerationIdentity,
        finish_reason: FinishReason | None,
        stats: RequestStats,
        tokens: SessionTokens,
        *,
        end: int,
    ) -> None:
        """Notes how a generation left its session: the first `end` of `tokens` were committed."""
        request = replace(record_of(identity), finish_reason=finish_reason, stats_json=encode_stats(stats))
        base = max(0, end - MAX_TAIL_TOKENS)
        token_ids = tokens.tail(base)[: end - base]
        self._log_repair.pop(lease.session_id, None)
        self._log_repair[lease.session_id] = Tail(lease, request, base, token_ids)
        if len(self._log_repair) > MAX_SESSIONS:
            self._log_repair.popitem(last=False)

    def forget(self, session_id: str) -> None:
        self._log_repair.pop(session_id, None)

    async def repair(self, session_id: str, record: SessionRecord | None) -> SessionRecord | None:
        """The session's record as it was left here, put right in the store where that lost some of it.

        What has begun to be put right is, whoever leaves meanwhile: under a lease that was given back instead, the
        session would look like one that another has written since.

        Args:
            session_id: of a session that no generation here runs on.
            record: as just loaded.

        Raises:
            SessionLost: the store lost more than is remembered.
            SessionBusy: another owner holds the session.
        """
        if (repairing := self._repairing.get(session_id)) is not None:
            await asyncio.wait([repairing])
            record = await self._store.load(session_id)
        tail = self._log_repair.get(session_id)
        if tail is None:
            return record
        if record is None or record.epoch > tail.lease.epoch:  # gone, or another has written it since
            self.forget(session_id)
            return record
        if tail.is_whole_in(record):
            return replace(record, was_left=True)
        lost = await self._missing_of(tail, session_id, record)
        task = asyncio.create_task(self._put_back(tail, record, lost))
        self._repairing[session_id] = task
        task.add_done_callback(lambda _: self._repairing.pop(session_id).cancelled() or task.exception())
        await asyncio.shield(task)
        return await self._store.load(session_id)

    async def _put_back(self, tail: Tail, record: SessionRecord, lost: TokenIds) -> None:
        session_id = record.session_id
        # A lease of ours that nobody runs under was given back, and the store has forgotten that as well.
        owner = record.owner if self._leases.is_ours(record.owner) else ""
        lease = await self._leases.acquire(session_id, create=False, owner=owner)
        self._log_repair[session_id] = replace(tail, lease=lease)
        is_repaired = False
        try:
            is_repaired = await self._repair(lease, record, tail.request, lost)
        finally:
            await self._release(lease, left=is_repaired or lease.was_left)

    async def _missing_of(self, tail: Tail, session_id: str, record: SessionRecord) -> TokenIds:
        """The tokens that the store lost. Raises SessionLost when what it holds is not what came before them."""
        is_same_turn = record.request is not None and record.request.request_id == tail.request.request_id
        stored = await self._store.read_tokens(session_id, tail.base)
        is_prefix = record.num_tokens >= tail.base and np.array_equal(stored, tail.token_ids[: len(stored)])
        # Of an older turn, what came before the remembered tokens may have been cut away since.
        if not is_prefix or (tail.base > 0 and not is_same_turn):
            raise SessionLost(
                f"the store lost the end of session {session_id}: {record.num_tokens} of {tail.end} tokens are left"
            )
        return tail.token_ids[len(stored) :]

    async def _repair(self, lease: Lease, record: SessionRecord, request: RequestRecord, lost: TokenIds) -> bool:
        """Appends what was lost, unless another has written the session since `record`; returns whether it did."""
        held = await self._store.load(lease.session_id)
        if held is None or (held.num_tokens, held.request) != (record.num_tokens, record.request):
            self.forget(lease.session_id)
            return False
        _log.warning("the store lost %d tokens of a session; appending them again", len(lost))
        await self._store.begin_request(lease, request, keep=record.num_tokens, token_ids=lost)
        return True

    async def _release(self, lease: Lease, *, left: bool) -> None:
        try:
            await self._store.release(lease, left=left)
        except SpecdecError as error:
            _log.warning("releasing session %s after its repair failed: %s", lease.session_id, error)
