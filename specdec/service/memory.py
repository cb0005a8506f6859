"""Keeps Python's cyclic garbage collector at rest while a service imports, and rare while it serves.

Called by the services' main modules.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

#: The collector looks for garbage among the youngest once this many more container objects were made than freed.
_GC_ALLOCATIONS = 50_000


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Stop the collector during imports that take seconds, a third of which it would take by walking all modules again.

    It never looks at objects that exist by the end.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle() -> None:
    """Keep the collector from walking what lives as long as the process, and from running many times a second.

    Services make hardly any cyclic objects: references free what a round made. Call it once all is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS, 10, 10)
