"""Draining by name: one replica, or this coordinator, accepts no new sessions, and its running turns end there.

An operator calls `Drain` again until nothing is left, and then ends the process. The process itself goes on, so that no
supervisor starts it again, and the drain can be undone. SIGTERM drains and ends it in one step
(`specdec.service.lifecycle`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from coordinator.generation.generation_service import GenerationService
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.replica import DRAFT, Replica
from specdec.contract.errors import NotFound, SpecdecError, Unavailable
from specdec.state.live_coordinators import COORDINATOR
from specdec.state.store import ReplicaRegistry

#: Largest number of names in an error message, and characters of a name that is unknown.
_MAX_LISTED, _MAX_SHOWN = 16, 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drained:
    """The rest on a replica, or on this coordinator, that takes no new sessions: the proto's `DrainResponse`."""

    replica_id: str
    role: str
    pool: str
    address: str
    num_streams: int
    num_sessions: int
    is_last: bool


class Drains:
    """Answers the `Drain` calls of one coordinator. Use from one event loop."""

    def __init__(
        self, pools: ReplicaPools, generations: GenerationService, registry: ReplicaRegistry | None = None
    ) -> None:
        """
        Args:
            pools: the replicas.
            generations: refuses new requests while this coordinator drains.
            registry: where other coordinators are found; None: there is none.
        """
        self._pools, self._generations, self._registry = pools, generations, registry
        self.address = ""
        """HOST:PORT under which clients call this coordinator."""
        self.on_leaving: Callable[[bool], Awaitable[None]] | None = None
        """Awaited with whether this coordinator takes no new requests from now on."""
        self._is_ending = False

    def end(self) -> None:
        """Note that the process shuts down: this coordinator takes requests never again."""
        self._is_ending = True
        self.on_leaving = None

    async def drain(self, name: str, *, undo: bool) -> Drained:
        """Drain a replica or this coordinator, or undo that, and return what is left there.

        Raises:
            NotFound: this coordinator knows no replica of that id or address.
            Unsupported: the replica is of a version that cannot be drained by a call.
            Unavailable: the replica does not answer, or the drain of a coordinator that shuts down is to be undone.
        """
        if name in (self._generations.coordinator_id, self.address):
            return await self._drain_itself(undo=undo)
        known = [replica for replica in self._pools.all_replicas() if replica.info]
        chosen = [replica for replica in known if name in (_name_of(replica), replica.address)]
        if not chosen:
            raise NotFound(await self._unknown(name, known), reason="REPLICA_NOT_FOUND", field="replica_id")
        replica = chosen[0]
        num_streams, num_sessions = await replica.link.set_draining(not undo)
        replica.on_doubt()  # asks for its new description at once
        others = [each for each in known if each is not replica and each.takes_sessions and _replaces(each, replica)]
        return Drained(
            replica_id=_name_of(replica),
            role=replica.role,
            pool=replica.pool,
            address=replica.address,
            num_streams=num_streams,
            num_sessions=num_sessions,
            is_last=not others,
        )

    async def _drain_itself(self, *, undo: bool) -> Drained:
        if undo and self._is_ending:
            raise Unavailable("this coordinator is shutting down", reason="DRAINING")
        if self._generations.is_leaving == undo:
            self._generations.is_leaving = not undo
            if self.on_leaving is not None:
                await self.on_leaving(not undo)
        own_id = self._generations.coordinator_id
        return Drained(
            replica_id=own_id,
            role=COORDINATOR,
            pool="",
            address=self.address,
            num_streams=self._generations.num_running,
            num_sessions=0,
            is_last=not [each for each in await self._coordinators() if each != own_id],
        )

    async def _unknown(self, name: str, known: list[Replica[Any]]) -> str:
        coordinators = await self._coordinators()
        if name in coordinators:
            return f"{name} is the coordinator at {coordinators[name]}; call it there: --endpoint {coordinators[name]}"
        names = [*sorted(map(_name_of, known)), f"this coordinator, {self._generations.coordinator_id}"]
        listed = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
        return f"no replica is called {name[:_MAX_SHOWN]!r}; there are {listed}"

    async def _coordinators(self) -> dict[str, str]:
        """Return the addresses of the coordinators that take requests, by their ids; empty if they are not known."""
        if self._registry is None:
            return {}
        try:
            records = await self._registry.replicas(COORDINATOR)
        except SpecdecError as error:
            _log.warning("cannot look for other coordinators: %s", error)
            return {}
        return {record.engine.replica_id: record.address for record in records if not record.engine.draining}


def _name_of(replica: Replica[Any]) -> str:
    return replica.info.replica_id if replica.info else ""


def _replaces(other: Replica[Any], replica: Replica[Any]) -> bool:
    """Return whether sessions of a replica may continue on another one."""
    if other.role != replica.role:
        return False
    if replica.role == DRAFT:
        return other.pool == replica.pool
    return all(other.serves(fingerprint) for fingerprint in replica.models)
