"""How a coordinator gets the right to write a session.

Not here: what a lease is (`specdec.state.store`), renewing one while a generation runs (`session`). Called by
`generations`.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from specdec.errors import SessionBusy
from specdec.state.store import Lease, SessionStore

#: Pause between attempts to take over a session whose owner may be dead.
TAKEOVER_PAUSE_S = 0.1


class Leases:
    """Leases under this coordinator's name."""

    def __init__(self, store: SessionStore, coordinator_id: str, ttl_s: float) -> None:
        self._store = store
        self._coordinator_id = coordinator_id
        self._ttl_s = ttl_s

    async def acquire(self, session_id: str, *, create: bool) -> Lease:
        """Takes a session that nobody holds. Raises as `SessionStore.acquire`."""
        owner = f"{self._coordinator_id}:{secrets.token_hex(8)}"
        return await self._store.acquire(session_id, owner=owner, ttl_s=self._ttl_s, create=create)

    async def take_over(self, session_id: str) -> Lease:
        """Takes a session with an unfinished request, waiting as long as a dead owner's lease may still live.

        Raises:
            SessionBusy: its owner lives.
            NotFound: it is gone.
        """
        deadline = time.monotonic() + self._ttl_s + TAKEOVER_PAUSE_S
        while True:
            try:
                return await self.acquire(session_id, create=False)
            except SessionBusy:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(TAKEOVER_PAUSE_S)
