"""The addresses at which a coordinator looks for replicas: static endpoints, or those in the registry."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from coordinator.replicas.replica import DRAFT, TARGET
from specdec.contract.errors import SpecdecError
from specdec.state.store import ReplicaRegistry

_log = logging.getLogger(__name__)

Endpoint = tuple[str, str]
"""Role and HOST:PORT."""


class ReplicaEndpoints:
    """Reads the registry, and remembers which process it last held at each address."""

    def __init__(self, static: Collection[Endpoint], registry: ReplicaRegistry | None) -> None:
        """Static endpoints turn the registry off."""
        self.static = frozenset(static)
        self._registry = None if static else registry
        self._incarnations: dict[Endpoint, str] = {}

    async def read(self, known: Iterable[Endpoint]) -> set[Endpoint]:
        """Return the endpoints; the `known` ones while the registry cannot be read, so that those go on serving."""
        if self._registry is None:
            return set(self.static)
        try:
            records = {(role, record.address): record.engine.incarnation
                       for role in (DRAFT, TARGET) for record in await self._registry.replicas(role)}  # fmt: skip
        except SpecdecError as error:
            _log.warning("cannot read the replica registry: %s", error)
            return set(known)
        self._incarnations |= records
        return set(records)

    def holds(self, endpoint: Endpoint, incarnation: str) -> bool:
        """Return whether the registry last held this process at an endpoint; False for static endpoints."""
        return self._registry is not None and self._incarnations.get(endpoint) == incarnation

    def forget(self, endpoint: Endpoint) -> None:
        """Drop what is remembered about an endpoint that has left."""
        self._incarnations.pop(endpoint, None)
