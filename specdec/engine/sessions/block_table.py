"""A sequence's block ids in the order of its positions, and since when the first of them are what they are.

It grows at its end and is cut from there: nothing else changes it. So whoever keeps a copy of it, as captured steps do
on the device, need only write what was added since. Not here: which blocks exist (`block_manager`). Device thread only.
"""

from __future__ import annotations

from itertools import count

_keys = count(1)


class BlockTable(list[int]):
    """Block ids; see `specdec.engine.base.LiveTable`."""

    __slots__ = ("_num_kept", "_prepared_turn", "key")

    def __init__(self) -> None:
        super().__init__()
        self.key = next(_keys)
        self._num_kept = 0
        self._prepared_turn: tuple[int, ...] = ()

    def __delitem__(self, where: object) -> None:
        """Cuts: only `[n:]` is deleted."""
        if not (isinstance(where, slice) and where.stop is None and where.step is None):
            raise TypeError("a block table is cut at its end")
        super().__delitem__(where)
        self._num_kept = min(self._num_kept, len(self))
        if len(self._prepared_turn) > len(self):
            self._prepared_turn = ()

    def __setitem__(self, where: object, value: object) -> None:
        raise TypeError("a block table is not written into")

    def take_kept(self) -> int:
        """How many of the first ids are what they were when this was last asked."""
        num_kept, self._num_kept = self._num_kept, len(self)
        return num_kept

    def first(self, num_blocks: int) -> tuple[int, ...]:
        """The first ids; the same tuple again where they are the same, as copying a long table in every step shows."""
        if len(self._prepared_turn) != num_blocks:
            self._prepared_turn = tuple(self[:num_blocks])
        return self._prepared_turn
