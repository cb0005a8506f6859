"""Settles a service's memory: the cyclic garbage collector, and what the C library keeps of freed memory.

Called by the services' main modules.
"""

from __future__ import annotations

import contextlib
import ctypes
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
    """Exclude the objects that exist now from the collector, let it run rarely from now on, and return freed memory.

    Services make very few cyclic objects; reference counts free those of a round. Call it once everything is loaded.
    """
    gc.collect()
    return_freed_memory()
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS, 10, 10)


def return_freed_memory() -> None:
    """Give the system the pages that hold nothing but freed memory; no effect if the C library is not glibc.

    glibc keeps pieces below 32 MB for later allocations. After a load these are most of the model's weights as they
    were before they were packed.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
