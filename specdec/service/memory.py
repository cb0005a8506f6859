"""What a process keeps for as long as it lives: out of the cyclic collector's sight, and in pages of 2 MB.

Between two messages a step reads weights through every cache, so that a service's own code and objects come from memory
again; in pages of 4 KB each of them has to be looked up there as well. Where the system has no large pages to give, the
memory stays as it is. Not here: weights and keys, which begin in large pages (`specdec.engine.large_pages`), or stay
where they are. Called by the services' main modules.
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

#: Number of container objects, allocated minus freed, after which the collector scans the youngest generation.
_GC_ALLOCATIONS = 50_000

#: It takes a tenth of a process's start: not for one that may be gone soon.
_GATHER_AFTER_S = 15.0

_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
#: Of memory that a process has asked for, the share that it uses; stacks of threads and pools that grow use less.
_LEAST_USED = 0.75
#: A service's objects and libraries are some 150 MB; what is beyond this is weights, which take seconds to be moved.
_MOST_BYTES = 512 << 20
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_MAPPINGS = Path("/proc/self/smaps")
#: Private, writable and of no file, with its size and how much of it is there.
_OWN_MEMORY = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(?:\[heap\])?\n(?:[A-Z].*\n)*?Rss: +(\d+) kB$", re.MULTILINE
)


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
    """Keeps the cyclic collector from walking what lives as long as the process, and from running many times a second;
    and has it gathered in large pages, a while later.

    Hardly anything that services make is cyclic: references free what a round made. Call it once all is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS, 10, 10)
    later = threading.Timer(_GATHER_AFTER_S, gather_pages)
    later.daemon = True
    later.start()


def gather_pages() -> None:
    """Has the system move what this process uses of its memory to pages of 2 MB, where it has such (from Linux 6.1 on)
    and is not told never to give any.

    It takes some tenths of a second, in which other threads run but for moments of some milliseconds.
    """
    try:
        if b"[never]" in (_LARGE_PAGES / "enabled").read_bytes():
            return
        if int((_LARGE_PAGES / "hpage_pmd_size").read_bytes()) != _PAGE_BYTES:  # 512 MB on some machines
            return
        mappings = _MAPPINGS.read_bytes()
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    used: list[tuple[int, int]] = []  # size and place
    for begin, end, used_kb in _OWN_MEMORY.findall(mappings):
        first, last = int(begin, 16), int(end, 16)
        if int(used_kb) << 10 >= _LEAST_USED * (last - first):
            first = -(-first // _PAGE_BYTES) * _PAGE_BYTES
            used.append((last // _PAGE_BYTES * _PAGE_BYTES - first, first))
    num_left = _MOST_BYTES
    for size, first in sorted(used):
        if 0 < size <= num_left:
            num_left -= size
            madvise(first, size, _MADV_COLLAPSE)
    _log.debug("asked for %d MB in large pages", (_MOST_BYTES - num_left) >> 20)
