"""A sequence's block ids in the order of its positions, with the length of their unchanged prefix.

A table only grows at its end and is cut from there. A copy of it, such as the one that CUDA graphs read on the device,
therefore needs only the ids that were added since the previous copy. Device thread only.
"""

from __future__ import annotations

from itertools import count

_keys = count(1)


class BlockTable(list[int]):
    """Block ids; see `specdec.engine.base.LiveTable`."""

    __slots__ = ("_num_kept", "_prefix", "key")

    def __init__(self) -> None:
        super().__init__()
        self.key = next(_keys)
        self._num_kept = 0
        self._prefix: tuple[int, ...] = ()

    def __delitem__(self, where: object) -> None:
        """Cut the table; only `del table[n:]` is allowed."""
        if not (isinstance(where, slice) and where.stop is None and where.step is None):
            raise TypeError("a block table is cut at its end")
        super().__delitem__(where)
        self._num_kept = min(self._num_kept, len(self))
        if len(self._prefix) > len(self):
            self._prefix = ()

    def __setitem__(self, where: object, value: object) -> None:
        raise TypeError("a block table is not written into")

    def take_kept(self) -> int:
        """Return how many leading block ids are unchanged since the previous call. Only the owner of the cached copy
        may call this."""
        num_kept, self._num_kept = self._num_kept, len(self)
        return num_kept

    def first(self, num_blocks: int) -> tuple[int, ...]:
        """Return the first ids, as the same tuple while they are unchanged: copying a long table every step is slow."""
        if len(self._prefix) != num_blocks:
            self._prefix = tuple(self[:num_blocks])
        return self._prefix
