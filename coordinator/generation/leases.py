"""Takes the leases under which this coordinator writes sessions.

`turn_preparer` takes a lease before it writes a turn, and `log_repair` before a repair. `lease_keeper` renews leases
while a generation runs; `specdec.state.store` defines what a lease grants.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from contextlib import suppress

from specdec.contract.errors import SessionBusy, SpecdecError
from specdec.contract.tenant import SessionKey
from specdec.state.store import Lease, SessionStore

#: Pause between attempts to take over a session whose owner may be dead.
TAKEOVER_PAUSE_S = 0.1


class Leases:
    """Leases under this coordinator's name."""

    def __init__(self, store: SessionStore, coordinator_id: str, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        # The random part tells this process from another one that was given the same id.
        self._owner_prefix = f"{coordinator_id}:{secrets.token_hex(8)}:"
        self._nonces = itertools.count()

    def is_ours(self, owner: str) -> bool:
        """Return whether this process took the lease of this owner name."""
        return owner.startswith(self._owner_prefix)

    async def acquire(self, key: SessionKey, *, create: bool, owner: str = "") -> Lease:
        """Take a session that is free, or whose lease `owner` holds. Raises as `SessionStore.acquire`.

        Cancelling leaves no lease behind, and no session that was created by this call.
        """
        owner = owner or f"{self._owner_prefix}{next(self._nonces)}"
        store = self._store.of_tenant(key.tenant)
        taking = asyncio.ensure_future(store.acquire(key.session_id, owner=owner, ttl_s=self._ttl_s, create=create))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.shield(self._give_back(taking))
            raise

    async def _give_back(self, taking: asyncio.Future[Lease]) -> None:
        """Undo an acquisition whose caller was cancelled. Where the store cannot be reached, the lease expires."""
        with suppress(SpecdecError):
            lease = await taking
            record = await self._store.of_tenant(lease.tenant).load(lease.session_id)
            if record is not None and record.request is None:
                await self._store.discard(lease)
            await self._store.release(lease, left=lease.was_left)

    async def take_over(self, key: SessionKey) -> Lease:
        """Take a session with an unfinished request. Wait as long as the lease of a dead owner may still live.

        Raises:
            SessionBusy: the owner of the session lives.
            NotFound: the session is gone.
        """
        deadline = time.monotonic() + self._ttl_s + TAKEOVER_PAUSE_S
        while True:
            try:
                return await self.acquire(key, create=False)
            except SessionBusy:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(TAKEOVER_PAUSE_S)
