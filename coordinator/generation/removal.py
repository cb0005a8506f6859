"""Removing a session everywhere: from the store, from this coordinator's memory, and its KV from the replicas.

Not here: who may ask for it, ending what runs on the session (`admission`). Also called for a session that a request
made and left without a token (`turn_preparer`, `generation`).
"""

from __future__ import annotations

from contextlib import suppress

from coordinator.generation.log_repair import LogRepair
from coordinator.replicas.placement import Placement
from coordinator.replicas.pool import ReplicaPools
from specdec.errors import NotFound, Unavailable
from specdec.state.store import Lease, SessionStore


class SessionRemoval:
    """Removes sessions that nothing runs on."""

    def __init__(
        self, store: SessionStore, tails: LogRepair, placement: Placement, pools: ReplicaPools, tenant: str
    ) -> None:
        """`tenant`: whose sessions these are."""
        self._store = store
        self._log_repair = tails
        self._placement = placement
        self._pools = pools
        self._tenant = tenant

    async def remove(self, session_id: str) -> None:
        """Whoever writes the session is told. Idempotent. Raises Unavailable when the store cannot be reached."""
        self._forget(session_id)
        await self._store.delete(session_id)
        await self._pools.release(session_id, tenant=self._tenant)

    async def after_failure(self, lease: Lease, *, is_useless: bool) -> None:
        """Finds out what has become of a session whose request failed, and removes it where it is of no use.

        Whatever the request failed with, its client may begin it anew, and so bring back what another coordinator has
        deleted meanwhile.

        Args:
            lease: that the request ran under.
            is_useless: it was made for this request, which has left nothing in it.

        Raises:
            NotFound: it was deleted meanwhile; its KV is freed here, too, unless it has been begun anew.
            LeaseLost: another coordinator has taken it over; it stays.
            Unavailable: the store cannot be reached.
        """
        try:
            await (self._store.discard(lease) if is_useless else self._store.renew(lease))
        except NotFound:
            self._forget(lease.session_id)
            with suppress(Unavailable):
                if await self._store.load(lease.session_id) is None:
                    await self._pools.release(lease.session_id, tenant=self._tenant)
            raise
        if is_useless:
            self._forget(lease.session_id)
            await self._pools.release(lease.session_id, tenant=self._tenant)

    def _forget(self, session_id: str) -> None:
        self._placement.forget(session_id)
        self._log_repair.forget(session_id)
