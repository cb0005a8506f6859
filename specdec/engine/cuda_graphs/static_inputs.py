"""The inputs of a recorded step: written on the host, then copied to the device in one transfer.

A bucket's rows form a rectangle. The rows of a sequence that is narrower than the bucket are at the end of their line,
because attention aligns the last query with the last key. The remaining rows and sequences are padding. Padding rows
store their keys and values in the scratch block, which no sequence has, and return no logits. Padding sequences read
only the scratch block; padding rows of a sequence read no more than its first row does. Called by
`engine.cuda_graphs.graph_steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice
from specdec.engine.cuda_graphs.buckets import Bucket
from specdec.engine.cuda_graphs.device_tables import CHANGES_PER_SEQUENCE, DeviceTables

NumbersT = TypeVar("NumbersT", torch.Tensor, NDArray[np.int64])


class StepNumbers:
    """One allocation on the host and one on the device, shared by all buckets because one step runs at a time."""

    def __init__(self, size: int, device: torch.device) -> None:
        """`size`: number of inputs of the largest bucket; see `input_size`."""
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=is_cuda)
        self.on_device = torch.zeros(size, dtype=torch.int64, device=device)
        self._copied = torch.cuda.Event() if is_cuda else None

    def writable(self) -> NDArray[np.int64]:
        """Return the numbers on the host, once the previous copy has read them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy()

    def upload(self, count: int) -> None:
        """Enqueue a copy of the first `count` numbers to the device, without waiting."""
        self.on_device[:count].copy_(self._host[:count], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.on_device.device))


class _Columns(NamedTuple, Generic[NumbersT]):
    """Views of a bucket's numbers."""

    token_ids: NumbersT  # [B, W]
    positions: NumbersT  # [B, W]
    slots: NumbersT  # [B, W]
    logit_rows: NumbersT  # [B, W]: rows of the rectangle that return logits, then padding
    opened_blocks: NumbersT  # [B]: block that each sequence begins and does not fill
    lengths: NumbersT  # [B]: number of keys once the step's are stored
    table_firsts: NumbersT  # [B]: index of each sequence's first block id
    changed_at: NumbersT  # [B * CHANGES_PER_SEQUENCE]: changed entries of tables on the device, see `DeviceTables`
    changed_to: NumbersT  # [B * CHANGES_PER_SEQUENCE]: their block ids
    tables: NumbersT  # [B * N], or [0] if tables stay on the device


def input_size(bucket: Bucket, *, keeps_tables: bool) -> int:
    """Return the number of inputs of a step; `keeps_tables`: whether block tables stay on the device."""
    return _first_table(bucket) + (0 if keeps_tables else bucket.num_blocks * bucket.num_sequences)


def _first_table(bucket: Bucket) -> int:
    return 4 * bucket.num_rows + (3 + 2 * CHANGES_PER_SEQUENCE) * bucket.num_sequences


def _lay_out(bucket: Bucket, numbers: NumbersT) -> _Columns[NumbersT]:
    B, W = bucket.num_sequences, bucket.width
    per_row = numbers[: 4 * B * W].reshape(4, B, W)
    first_change, first_table = 4 * B * W + 3 * B, _first_table(bucket)
    opened_blocks, lengths, table_firsts = numbers[4 * B * W : first_change].reshape(3, B)
    changed_at, changed_to = numbers[first_change:first_table].reshape(2, -1)
    tables = numbers[first_table : first_table + B * bucket.num_blocks]  # empty if tables stay on the device
    return _Columns(
        per_row[0], per_row[1], per_row[2], per_row[3], opened_blocks, lengths, table_firsts, changed_at, changed_to,
        tables,
    )  # fmt: skip


class StaticInputs:
    """Inputs of a step of one bucket. The tensors stay the same; `fill` changes their content."""

    def __init__(self, bucket: Bucket, numbers: StepNumbers, scratch_block: int, tables: DeviceTables | None) -> None:
        """
        Args:
            bucket: size of the step.
            numbers: memory of the inputs, shared with other buckets.
            scratch_block: block of the pool that no sequence has.
            tables: block tables on the device; None: each step transfers tables as long as the bucket's context.
        """
        self.bucket = bucket
        self.tables = tables
        self.on_device = _lay_out(bucket, numbers.on_device)
        self._numbers = numbers
        self._scratch_block = scratch_block

    def fill(self, slices: Sequence[SequenceSlice]) -> None:
        """Write the inputs of a step that the bucket holds; without slices, the step consists of padding."""
        columns = _lay_out(self.bucket, self._numbers.writable())
        columns.token_ids[:] = 0
        columns.positions[:] = 0
        columns.slots[:] = self._scratch_block * BLOCK_TOKENS
        columns.logit_rows[:] = 0
        columns.opened_blocks[:] = self._scratch_block
        columns.lengths[:] = 1
        if self.tables is None:
            tables = columns.tables
            self._fill_tables(columns, slices)
        else:
            tables = self.tables.host
            columns.table_firsts[:] = self.tables.padding_entry
            columns.table_firsts[: len(slices)] = self.tables.place(slices, columns.changed_at, columns.changed_to)
        if slices:
            self._fill_rows(columns, slices, tables)
        self._numbers.upload(input_size(self.bucket, keeps_tables=self.tables is not None))

    def _fill_tables(self, columns: _Columns[NDArray[np.int64]], slices: Sequence[SequenceSlice]) -> None:
        width = self.bucket.num_blocks
        columns.tables[:] = self._scratch_block
        columns.table_firsts[:] = np.arange(0, len(columns.tables), width)
        for index, piece in enumerate(slices):
            num_blocks = -(-(piece.start + len(piece.token_ids)) // BLOCK_TOKENS)
            table = columns.tables[index * width : (index + 1) * width]
            table[:num_blocks] = piece.block_table[:num_blocks]
            # These entries are masked but read, so they must not point to another sequence's blocks, whose NaNs would
            # reach the sums.
            table[num_blocks:] = piece.block_table[0]

    def _fill_rows(
        self, columns: _Columns[NDArray[np.int64]], slices: Sequence[SequenceSlice], tables: NDArray[np.int64]
    ) -> None:
        n, W = len(slices), self.bucket.width
        starts = np.array([piece.start for piece in slices])
        ends = starts + [len(piece.token_ids) for piece in slices]
        positions = ends[:, None] - W + np.arange(W)  # [n, W]
        is_padding = positions < starts[:, None]
        positions = np.maximum(positions, starts[:, None])
        firsts = columns.table_firsts[:n]
        own_slots = tables[firsts[:, None] + positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        columns.positions[:n] = positions
        columns.slots[:n] = np.where(is_padding, columns.slots[:n], own_slots)
        columns.token_ids[:n][~is_padding] = [token_id for piece in slices for token_id in piece.token_ids]
        columns.lengths[:n] = ends
        # Blocks that are begun and not filled: masked slots still hold numbers of a former owner.
        last = ends - 1
        is_opened = (last - last % BLOCK_TOKENS >= starts) & (last % BLOCK_TOKENS < BLOCK_TOKENS - 1)
        columns.opened_blocks[:n][is_opened] = tables[firsts + last // BLOCK_TOKENS][is_opened]
        wanted = [
            row
            for end, piece in zip(range(W, n * W + 1, W), slices, strict=True)
            for row in range(end - piece.num_logit_rows, end)
        ]
        columns.logit_rows.reshape(-1)[: len(wanted)] = wanted
