"""The names of the draft pools that a coordinator knows, in the order in which requests get them.

A name belongs to drafts found in text, to draft replicas, or to drafts that targets make by themselves. Names are kept
while their replicas are away, so that a request that names one waits for it instead of being refused. `pool` owns the
names and adds to them as replicas describe themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from coordinator.replicas.replica import DRAFT, TARGET, Replica
from specdec.contract.errors import NotFound, Unsupported

#: Largest number of names, local drafts included. Each name has statistics.
MAX_POOLS = 256

#: Largest number of names in an error message.
_MAX_LISTED = 16


class DraftPoolNames:
    """All names that have been seen. Used from one event loop."""

    def __init__(self, lookup: Sequence[str], first_model_pool: str) -> None:
        """
        Args:
            lookup: names of the pools of drafts found in text, by the coordinator itself.
            first_model_pool: pool of draft replicas that comes first; the others are in order of name.
        """
        self.lookup = tuple(lookup)
        self.models: set[str] = set()
        self.local: dict[str, None] = {}
        """Drafts that targets make by themselves, in the order in which they were first described."""
        self._first_model_pool = first_model_pool

    @property
    def all(self) -> set[str]:
        return {*self.models, *self.lookup, *self.local}

    def note(self, replica: Replica[Any]) -> None:
        """Add the names that a replica describes.

        Raises:
            Unsupported: a name is taken by drafts found in text, or there are too many names.
        """
        names = (replica.pool,) if replica.role == DRAFT else local_drafts(replica)
        if name := next((name for name in names if name in self.lookup), ""):
            raise Unsupported(f"{replica.address} calls its pool {name}, which is the coordinator's own")
        if len(self.all.union(names)) > MAX_POOLS:
            raise Unsupported(f"{replica.address} adds to {MAX_POOLS} names of draft pools, the most there may be")
        if replica.role == DRAFT:
            self.models.add(replica.pool)
        else:
            self.local |= dict.fromkeys(names)

    def in_order(self, model_pools: Iterable[str]) -> list[str]:
        """Return pools of draft replicas in the order in which requests get them."""
        return sorted(model_pools, key=lambda name: (name != self._first_model_pool, name))


def unknown_pool(pool: str, field: str, known: Collection[str]) -> NotFound:
    """Return the error for a request whose `field` names a pool that is not among the known ones."""
    listed = ", ".join(sorted(known)[:_MAX_LISTED]) or "none"
    more = f" and {len(known) - _MAX_LISTED} more" if len(known) > _MAX_LISTED else ""
    message = f"{field} {pool[:64]!r} is not a draft pool; there are {listed}{more}"
    return NotFound(message, reason="POOL_NOT_FOUND", field=field)


def local_drafts(replica: Replica[Any]) -> tuple[str, ...]:
    """Return the pools in which a target drafts by itself."""
    return replica.info.local_drafts if replica.role == TARGET and replica.info else ()
