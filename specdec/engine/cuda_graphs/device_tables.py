"""Block tables that stay on the device from step to step; a step brings what was added to them.

A table of a context of 8,000 tokens has 500 entries, of which a step of its sequence adds one in three steps or so.
Each of the newest sequences has a row of one large array; a few changed entries travel with the numbers of the step
that needs them and are put in their places by that step, a new sequence's are copied at once. Not here: what else a
step brings (`engine.cuda_graphs.static_inputs`, which calls this), which ids a table has (`engine.sessions`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.engine.base import SequenceSlice
from specdec.engine.cuda_graphs.buckets import MOST_SEQUENCES

#: Of one sequence and step; more of them are copied instead. A long draft needs two.
CHANGES_PER_SEQUENCE = 2
# Sequences that take turns find their rows again.
_NUM_ROWS = 2 * MOST_SEQUENCES


class DeviceTables:
    """Rows of block ids. One step at a time; what it placed is in effect for the steps that follow it."""

    def __init__(self, row_blocks: int, scratch_block: int, device: torch.device) -> None:
        """
        Args:
            row_blocks: entries of the longest table.
            scratch_block: what padding reads.
            device: of the tables.
        """
        is_cuda = device.type == "cuda"
        self.padding_entry = _NUM_ROWS * row_blocks
        """Where the scratch block is an entry."""
        size = self.padding_entry + 1
        self._pinned = torch.full((size,), scratch_block, dtype=torch.int64, pin_memory=is_cuda)
        self.host: NDArray[np.int64] = self._pinned.numpy()
        """[rows * row_blocks + 1]: what the device has once the step's changes are applied."""
        self.on_device = torch.full((size,), scratch_block, dtype=torch.int64, device=device)
        self._copied = torch.cuda.Event() if is_cuda else None
        self._row_blocks = row_blocks
        self._scratch_block = scratch_block
        self._row_of: OrderedDict[object, int] = OrderedDict()  # the least recently used first
        self._num_right: list[int] = [0] * _NUM_ROWS
        """Of each row, entries that the device has."""

    def place(
        self, slices: Sequence[SequenceSlice], changed_at: NDArray[np.int64], changed_to: NDArray[np.int64]
    ) -> list[int]:
        """Where the slices' tables begin; each holds all ids of `SequenceSlice.table`, or of the slice.

        Args:
            slices: of one step, no more than there are rows.
            changed_at: written to: entries that the step must `apply`, padding behind them.
            changed_to: likewise, their ids.
        """
        if self._copied is not None:
            self._copied.synchronize()  # nothing is written that is still being copied
        changed_at[:], changed_to[:] = self.padding_entry, self._scratch_block
        num_changes, firsts = 0, []
        for index, piece in enumerate(slices):
            # A rank that follows knows no tables, only ids; sessions mostly keep their place in the step.
            row = self._row(("place", index) if piece.table is None else piece.table.key)
            table = piece.block_table if piece.table is None else piece.table
            first, end = row * self._row_blocks, min(len(table), self._row_blocks)
            # Asked whether or not the row is new: what was kept is counted from here on.
            num_kept = self._num_equal(first, piece.block_table) if piece.table is None else piece.table.take_kept()
            begin = min(num_kept, self._num_right[row])
            self._num_right[row] = end
            firsts.append(first)
            if begin >= end:
                continue
            ids = table[begin:end]
            self.host[first + begin : first + end] = ids
            room = slice(num_changes, num_changes + end - begin)
            if end - begin <= CHANGES_PER_SEQUENCE and room.stop <= len(changed_at):
                changed_at[room], changed_to[room] = np.arange(first + begin, first + end), ids
                num_changes = room.stop
            else:
                self._copy(first + begin, first + end)
        return firsts

    def apply(self, changed_at: torch.Tensor, changed_to: torch.Tensor) -> None:
        """Puts a step's changes, on the device, where they belong; again and again if need be."""
        self.on_device.index_copy_(0, changed_at, changed_to)

    def _row(self, key: object) -> int:
        row = self._row_of.get(key)
        if row is None:
            row = len(self._row_of) if len(self._row_of) < _NUM_ROWS else self._row_of.popitem(last=False)[1]
            self._row_of[key] = row
            self._num_right[row] = 0
        self._row_of.move_to_end(key)
        return row

    def _num_equal(self, first: int, block_ids: Sequence[int]) -> int:
        """How many of a table's first ids already stand in the row that begins at `first`."""
        ids = np.asarray(block_ids[: self._row_blocks])
        differing = np.flatnonzero(self.host[first : first + len(ids)] != ids)
        return int(differing[0]) if len(differing) else len(ids)

    def _copy(self, begin: int, end: int) -> None:
        self.on_device[begin:end].copy_(self._pinned[begin:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.on_device.device))
