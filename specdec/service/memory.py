"""Keeps Python's cyclic garbage collector at rest while a service imports, and rare while it serves.

Called by the services' main modules.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

#: Number of container objects, allocated minus freed, after which the collector scans the youngest generation.
_GC_ALLOCATIONS = 50_000


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Switch the cyclic garbage collector off during long imports, of which it takes a third of the time.

    The objects that exist at the end are never scanned afterwards.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle() -> None:
    """Exclude the objects that exist now from the collector, and let it run rarely from now on.

    Services make very few cyclic objects; reference counts free those of a round. Call it once everything is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS, 10, 10)
