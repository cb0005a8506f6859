"""Memory for what every step reads, in pages of 2 MB where the system gives such pages when asked (Linux, `madvise`).

In pages of 4 KB a processor looks an address up every 64 cache lines and reads ahead no further: weights came at two
thirds to three quarters of the speed that they come at in large pages (docs/history/performance.md). Where a system has
none, the memory is the same in small ones. Not here: what lies in it. Called by `specdec.engine.native.packing` and
`specdec.engine.model.kv_cache`.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

_PAGE_BYTES = 2 << 20
#: Asked of the system at once; what is not written takes no memory.
_CHUNK_BYTES = 32 << 20
_CACHE_LINE_BYTES = 64


def zeros(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], at the start of a page; a page takes memory only once it is written.

    Raises:
        MemoryError: the system does not promise so much.
    """
    try:  # one page more, because the system may begin anywhere
        memory = mmap.mmap(-1, num_bytes + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {num_bytes} bytes of memory: {error}") from error
    with contextlib.suppress(AttributeError, OSError):  # an operating system, or a Linux, that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # and keeps it
    begin = -whole.data_ptr() % _PAGE_BYTES
    return whole[begin : begin + num_bytes]


class LargePages:
    """Hands out pieces that lie one after the other, as they are read. A piece lives as long as any of its chunk."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers, contiguous, from a cache line on."""
        taken = -(-tensor.nbytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
        if taken > len(self._rest):
            self._rest = zeros(-(-max(taken, _CHUNK_BYTES) // _PAGE_BYTES) * _PAGE_BYTES)
        piece, self._rest = self._rest[: tensor.nbytes], self._rest[taken:]
        return piece.view(tensor.dtype).view(tensor.shape).copy_(tensor)
