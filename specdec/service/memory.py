"""What a process keeps for as long as it lives: out of the cyclic collector's sight, and in pages of 2 MB.

Between two messages a step reads weights through every cache, so that a service's own code and objects come from memory
again; in pages of 4 KB each of them has to be looked up there as well. Where the system has no large pages to give, the
memory stays as it is. Not here: weights and keys, which begin in large pages (`specdec.engine.large_pages`). Called by
the services' main modules.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import re
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)

#: Container objects more than were freed, until the cyclic collector looks for garbage among the youngest.
_GC_ALLOCATIONS = 50_000

_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
#: Of memory that a process has asked for, the share that it uses; stacks of threads and pools that grow use less.
_LEAST_USED = 0.75
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPPINGS = Path("/proc/self/smaps")
#: Private, writable and of no file, with its size and how much of it is there.
_OWN_MEMORY = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(?:\[heap\])?\n(?:[A-Z].*\n)*?Rss: +(\d+) kB$", re.MULTILINE
)


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """For imports that take seconds: a third of those is the cyclic collector's, which walks all of it again and again.

    What is there by the end it never looks at.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle() -> None:
    """Keeps the cyclic collector from walking what lives as long as the process, and from running many times a second,
    and gathers it in large pages.

    Hardly anything that services make is cyclic: references free what a round made. Call it once all is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS, 10, 10)
    _log.debug("%d MB are in large pages now", gather_pages() >> 20)


def gather_pages() -> int:
    """Has the system move what this process uses of its memory to pages of 2 MB; it takes some hundredths of a second.

    Returns:
        Bytes that lie in such pages now; 0 on a system without them (before Linux 6.1), or one that is told never to
        give any.
    """
    try:
        if "[never]" in _SETTING.read_text():
            return 0
        mappings = _MAPPINGS.read_text()
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return 0
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    num_gathered = 0
    for begin, end, used_kb in _OWN_MEMORY.findall(mappings):
        first, last = int(begin, 16), int(end, 16)
        if int(used_kb) << 10 < _LEAST_USED * (last - first):
            continue
        for page in range(-(-first // _PAGE_BYTES) * _PAGE_BYTES, last - _PAGE_BYTES + 1, _PAGE_BYTES):
            num_gathered += madvise(page, _PAGE_BYTES, _MADV_COLLAPSE) == 0
    return num_gathered * _PAGE_BYTES
