"""Allocate memory that every step reads in pages of 2 MB, on systems that support it (Linux, `madvise`).

In pages of 4 KB a processor translates an address every 64 cache lines and does not prefetch beyond: weights were read
at two thirds to three quarters of the speed that large pages give (docs/history/performance.md). On other systems the
memory has small pages. Called by `specdec.engine.native.packing` and `specdec.engine.model.kv_cache`.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

_PAGE_BYTES = 2 << 20
#: Bytes requested from the system at once; pages that are never written take no memory.
_CHUNK_BYTES = 32 << 20
_CACHE_LINE_BYTES = 64


def zeros(num_bytes: int) -> torch.Tensor:
    """Return uint8 [num_bytes] zeros that start at a page boundary; a page takes memory only once it is written.

    Raises:
        MemoryError: the system does not grant the memory.
    """
    try:  # one page more, because the mapping may start anywhere in a page
        memory = mmap.mmap(-1, num_bytes + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {num_bytes} bytes of memory: {error}") from error
    with contextlib.suppress(AttributeError, OSError):  # this system has no large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    begin = -whole.data_ptr() % _PAGE_BYTES
    return whole[begin : begin + num_bytes]


class LargePages:
    """Allocator of adjacent pieces. A chunk's memory is freed once all of its pieces are."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy that starts at a cache line."""
        return self.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] zeros that start at a cache line."""
        taken = -(-num_bytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
        if taken > len(self._rest):
            self._rest = zeros(-(-max(taken, _CHUNK_BYTES) // _PAGE_BYTES) * _PAGE_BYTES)
        piece, self._rest = self._rest[:num_bytes], self._rest[taken:]
        return piece
