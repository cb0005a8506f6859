"""Tells a replica which turns have ended, so that it gives back the KV blocks that are reserved for them.

It matters most if a client has gone in the middle of a stream: the replica may still run a call of its turn.
`placement` notes the ends. One message is on the way at a time, with all turns that ended since the one before it was
sent. A message that is lost costs blocks only for the time that a replica holds a silent turn's reservation.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import Any, NamedTuple, Protocol

from specdec.contract.errors import SpecdecError
from specdec.contract.tenant import SessionKey

#: Largest number of turns in one message; the replica's limit is higher.
MAX_TURNS = 1024

_log = logging.getLogger(__name__)


class TurnEndLink(Protocol):
    """The part of a link that carries the ends of turns (`specdec.rpc.link`)."""

    async def end_turns(self, epochs: dict[str, int], *, resumable_ids: list[str], tenant: str) -> None: ...


class _End(NamedTuple):
    """The end of a turn."""

    epoch: int
    may_resume: bool


class TurnEnds:
    """The ended turns that one replica has not been told of. Used from one event loop."""

    def __init__(self, link: Any) -> None:
        """`link` is a `TurnEndLink`."""
        self._link: TurnEndLink = link
        self._waiting: dict[SessionKey, _End] = {}
        self._sending: asyncio.Task[None] | None = None

    def note(self, key: SessionKey, epoch: int, *, may_resume: bool = False) -> None:
        """Note that the turn of a session that ran under an epoch has ended; `may_resume`: before its last token."""
        self._waiting[key] = _End(epoch, may_resume)
        if self._sending is None or self._sending.done():
            # An own context: its records must not have the ids of the request that came first.
            self._sending = asyncio.create_task(self._send(), name="turn ends", context=contextvars.Context())

    async def close(self) -> None:
        """Stop telling. Idempotent."""
        self._waiting.clear()
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])

    async def _send(self) -> None:
        while self._waiting:
            tenant = next(iter(self._waiting)).tenant
            keys = [key for key in self._waiting if key.tenant == tenant][:MAX_TURNS]
            ends = {key.session_id: self._waiting.pop(key) for key in keys}
            epochs = {session_id: end.epoch for session_id, end in ends.items()}
            resumable_ids = [session_id for session_id, end in ends.items() if end.may_resume]
            try:
                await self._link.end_turns(epochs, resumable_ids=resumable_ids, tenant=tenant)
            except SpecdecError as error:
                _log.info("the ends of %d turns did not reach the replica: %s", len(epochs), error)
