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
import threading
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)

#: Container objects more than were freed, until the cyclic collector looks for garbage among the youngest.
_GC_ALLOCATIONS = 50_000

#: It takes a tenth of a process's start: not for one that may be gone soon, and not before its first calls.
_GATHER_AFTER_S = 15.0

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
    """Keeps the cyclic collector from walking what lives as long as the process, and from running many times a second;
    and has it gathered in large pages, a while later.

    Hardly anything that services make is cyclic: references free what a round made. Call it once all is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS, 10, 10)
    later = threading.Timer(_GATHER_AFTER_S, lambda: _log.debug("%d MB in large pages", gather_pages() >> 20))
    later.daemon = True
    later.start()


def gather_pages() -> int:
    """Has the system move what this process uses of its memory to pages of 2 MB.

    It takes some tenths of a second, in which other threads run but for moments of some milliseconds.

    Returns:
        Bytes that were moved; 0 on a system without them (before Linux 6.1), or one that is told never to
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
    before = _num_large_kb(mappings)
    for begin, end, used_kb in _OWN_MEMORY.findall(mappings):
        first, last = int(begin, 16), int(end, 16)
        if int(used_kb) << 10 < _LEAST_USED * (last - first):
            continue
        first, last = -(-first // _PAGE_BYTES) * _PAGE_BYTES, last // _PAGE_BYTES * _PAGE_BYTES
        if first < last:  # at once: each call begins with all processors' putting away what they have in hand
            madvise(first, last - first, _MADV_COLLAPSE)
    return (_num_large_kb(_MAPPINGS.read_text()) - before) << 10


def _num_large_kb(mappings: str) -> int:
    return sum(int(kb) for kb in re.findall(r"^AnonHugePages: +(\d+) kB$", mappings, re.MULTILINE))
