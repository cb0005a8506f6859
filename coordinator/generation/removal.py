"""Removes a session everywhere: from the store, from this coordinator's memory, and its KV from the replicas.

`generation_service` removes sessions that clients delete. `turn_preparer` and `held_session` remove a session that was
created for a request which then failed without a token.
"""

from __future__ import annotations

from contextlib import suppress

from coordinator.generation.log_repair import LogRepair
from coordinator.replicas.placement import Placement
from coordinator.replicas.pool import ReplicaPools
from specdec.contract.errors import NotFound, Unavailable
from specdec.contract.tenant import SessionKey
from specdec.state.store import Lease, SessionStore


class SessionRemoval:
    """Removes sessions that no generation here uses."""

    def __init__(self, store: SessionStore, log_repair: LogRepair, placement: Placement, pools: ReplicaPools) -> None:
        self._store = store
        self._log_repair = log_repair
        self._placement = placement
        self._pools = pools

    async def remove(self, key: SessionKey) -> None:
        """Remove a session. A coordinator that still writes it gets NotFound. Idempotent.

        Raises Unavailable when the store cannot be reached.
        """
        self._forget(key)
        await self._store.of_tenant(key.tenant).delete(key.session_id)
        await self._release(key)

    async def after_failure(self, lease: Lease, *, is_useless: bool) -> None:
        """Check that a session whose request failed still exists, and remove it if it is of no use.

        Without the check, a client that repeats the request would bring back a session that was deleted meanwhile
        through another coordinator.

        Args:
            lease: lease that the request ran under.
            is_useless: the session was created for this request, which left nothing in it.

        Raises:
            NotFound: the session was deleted. Its KV is freed here too, unless the session has been created again.
            LeaseLost: another coordinator has taken the session over; it stays.
            Unavailable: the store cannot be reached.
        """
        try:
            await (self._store.discard(lease) if is_useless else self._store.renew(lease))
        except NotFound:
            self._forget(lease.key)
            with suppress(Unavailable):
                if await self._store.of_tenant(lease.tenant).load(lease.session_id) is None:
                    await self._release(lease.key)
            raise
        if is_useless:
            self._forget(lease.key)
            await self._release(lease.key)

    async def _release(self, key: SessionKey) -> None:
        await self._pools.release(key.session_id, tenant=key.tenant)

    def _forget(self, key: SessionKey) -> None:
        self._placement.forget(key)
        self._log_repair.forget(key)
