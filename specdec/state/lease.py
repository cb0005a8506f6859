"""Keeping a session's lease alive while a generation runs, and telling the generation when it is gone.

Not here: what a lost lease means for a round (the coordinator). Called by the coordinator, one keeper a generation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from types import TracebackType
from typing import Self

from specdec.errors import LeaseLost, Unavailable
from specdec.state.store import Lease, SessionStore

_log = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews a lease every third of its TTL while the context is open, and gives it back on exit.

    A store that cannot be reached is tried again until the TTL since the last renewal has passed: by then another owner
    may hold the session. Losing the lease never cancels the caller; it sets `lost`.
    """

    def __init__(self, store: SessionStore, lease: Lease) -> None:
        self.lease = lease
        self.lost = asyncio.Event()
        """Set once the lease is not, or may not be, ours any more."""
        self._store = store
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name=f"lease {self.lease.session_id}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        try:
            await self._store.release(self.lease)
        except Unavailable as unavailable:
            _log.warning("could not release the lease of session %s: %s", self.lease.session_id, unavailable)

    def check(self) -> None:
        """Raises LeaseLost once the lease is lost."""
        if self.lost.is_set():
            raise LeaseLost(f"the lease of session {self.lease.session_id!r} is not ours any more")

    async def _run(self) -> None:
        renewed_at = time.monotonic()
        while time.monotonic() - renewed_at < self.lease.ttl_s:
            await asyncio.sleep(self.lease.ttl_s / 3)
            sent_at = time.monotonic()
            try:
                await self._store.renew(self.lease)
            except LeaseLost:
                break
            except Unavailable as error:
                _log.warning("could not renew the lease of session %s: %s", self.lease.session_id, error)
            else:
                renewed_at = sent_at
        self.lost.set()
