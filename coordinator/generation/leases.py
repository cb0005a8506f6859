"""How a coordinator gets the right to write a session.

With the lease a request goes back to `turn_preparer`, which writes the turn's beginning under it. Not here: what a
lease is (`specdec.state.store`), renewing one while a generation runs (`lease_keeper`). Called by `turn_preparer` and
`tails`.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from contextlib import suppress

from specdec.errors import SessionBusy, SpecdecError
from specdec.state.store import Lease, SessionStore

#: Pause between attempts to take over a session whose owner may be dead.
TAKEOVER_PAUSE_S = 0.1


class Leases:
    """Leases under this coordinator's name."""

    def __init__(self, store: SessionStore, coordinator_id: str, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        # Of this process: another one may have been given the same id.
        self._owner_prefix = f"{coordinator_id}:{secrets.token_hex(8)}:"
        self._nonces = itertools.count()

    def is_ours(self, owner: str) -> bool:
        """Whether a lease was taken by this process."""
        return owner.startswith(self._owner_prefix)

    async def acquire(self, session_id: str, *, create: bool, owner: str = "") -> Lease:
        """Takes a session that nobody holds, or that `owner` did. Raises as `SessionStore.acquire`.

        Cancelling leaves no lease behind, and no session that was made for it.
        """
        owner = owner or f"{self._owner_prefix}{next(self._nonces)}"
        taking = asyncio.ensure_future(self._store.acquire(session_id, owner=owner, ttl_s=self._ttl_s, create=create))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.shield(self._give_back(taking))
            raise

    async def _give_back(self, taking: asyncio.Future[Lease]) -> None:
        """Undoes an acquisition that nobody is waiting for. What cannot be undone expires by itself."""
        with suppress(SpecdecError):
            lease = await taking
            record = await self._store.load(lease.session_id)
            if record is not None and record.request is None:
                await self._store.discard(lease)
            await self._store.release(lease, left=lease.was_left)

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
