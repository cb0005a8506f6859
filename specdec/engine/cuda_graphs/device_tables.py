"""Block tables that stay on the device between steps, so that a step transfers only the entries that changed.

The table of an 8,000-token context has 500 entries, and a step adds about one entry in three steps. Each recently used
sequence has a row in one large array. A few changed entries travel with the step's other numbers, and the step itself
writes them into the array; the table of a new sequence is copied at once. Called by `engine.cuda_graphs.static_inputs`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.engine.base import SequenceSlice
from specdec.engine.cuda_graphs.buckets import MOST_SEQUENCES

#: Maximum number of changed entries of one sequence that travel with a step; more are copied at once. A long multi-step
#: draft changes two.
CHANGES_PER_SEQUENCE = 2
# Twice the sequences of a step, so that sequences that run in alternate steps keep their rows.
_NUM_ROWS = 2 * MOST_SEQUENCES


class DeviceTables:
    """Rows of block ids. Serves one step at a time; later steps see its changes."""

    def __init__(self, row_blocks: int, scratch_block: int, device: torch.device) -> None:
        """
        Args:
            row_blocks: number of entries of the longest table.
            scratch_block: block that padding rows read.
            device: device of the tables.
        """
        is_cuda = device.type == "cuda"
        self.padding_entry = _NUM_ROWS * row_blocks
        """Index of the entry that holds the scratch block."""
        size = self.padding_entry + 1
        self._pinned = torch.full((size,), scratch_block, dtype=torch.int64, pin_memory=is_cuda)
        self.host: NDArray[np.int64] = self._pinned.numpy()
        """int64 [rows * row_blocks + 1]: the device's content once the step's changes are applied."""
        self.on_device = torch.full((size,), scratch_block, dtype=torch.int64, device=device)
        self._copied = torch.cuda.Event() if is_cuda else None
        self._row_blocks = row_blocks
        self._scratch_block = scratch_block
        self._row_of: OrderedDict[object, int] = OrderedDict()  # least recently used first
        self._num_right: list[int] = [0] * _NUM_ROWS
        """Number of leading entries of each row that are right on the device."""

    def place(
        self, slices: Sequence[SequenceSlice], changed_at: NDArray[np.int64], changed_to: NDArray[np.int64]
    ) -> list[int]:
        """Return the index of each slice's first table entry.

        A row holds all ids of `SequenceSlice.table`, or those of the slice if it has no table.

        Args:
            slices: slices of one step, at most one per row.
            changed_at: receives the indices that the step must `apply`, followed by padding.
            changed_to: receives their block ids.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the pinned memory may still be the source of a copy
        changed_at[:], changed_to[:] = self.padding_entry, self._scratch_block
        num_changes, firsts = 0, []
        for index, piece in enumerate(slices):
            # A follower rank receives block ids without a table. Sessions mostly keep their place in the step.
            row = self._row(("place", index) if piece.table is None else piece.table.key)
            table = piece.block_table if piece.table is None else piece.table
            first, end = row * self._row_blocks, min(len(table), self._row_blocks)
            # `take_kept` is called even for a new row because it counts from its last call.
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
        """Write a step's changes into the tables on the device. Idempotent."""
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
        """Return how many leading ids of a table equal the row that begins at `first`."""
        ids = np.asarray(block_ids[: self._row_blocks])
        differing = np.flatnonzero(self.host[first : first + len(ids)] != ids)
        return int(differing[0]) if len(differing) else len(ids)

    def _copy(self, begin: int, end: int) -> None:
        self.on_device[begin:end].copy_(self._pinned[begin:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.on_device.device))
