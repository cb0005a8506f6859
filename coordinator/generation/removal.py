"""Removing a session everywhere: from the store, from this coordinator's memory, and its KV from the replicas.

Not here: who may ask for it, ending what runs on the session (`admission`). Also called for a session that a request
made and left without a token (`beginnings`, `generation`).
"""

from __future__ import annotations

from coordinator.generation.tails import Tails
from coordinator.replicas.placement import Placement
from coordinator.replicas.pool import ReplicaPools
from specdec.state.store import Lease, SessionStore


class SessionRemoval:
    """Removes sessions that nothing runs on."""

    def __init__(
        self, store: SessionStore, tails: Tails, placement: Placement, pools: ReplicaPools, tenant: str
    ) -> None:
        """`tenant`: whose sessions these are."""
        self._store = store
        self._tails = tails
        self._placement = placement
        self._pools = pools
        self._tenant = tenant

    async def remove(self, session_id: str) -> None:
        """Whoever writes the session is told. Idempotent. Raises Unavailable when the store cannot be reached."""
        self._forget(session_id)
        await self._store.delete(session_id)
        await self._pools.release(session_id, tenant=self._tenant)

    async def remove_held(self, lease: Lease) -> None:
        """Removes a session if it is still ours.

        Raises:
            LeaseLost: another coordinator has taken it over meanwhile; it stays.
            NotFound: it was deleted meanwhile.
            Unavailable: the store cannot be reached.
        """
        await self._store.discard(lease)
        self._forget(lease.session_id)
        await self._pools.release(lease.session_id, tenant=self._tenant)

    def _forget(self, session_id: str) -> None:
        self._placement.forget(session_id)
        self._tails.forget(session_id)
