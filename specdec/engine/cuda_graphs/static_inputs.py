"""The numbers of a captured step: written on the host, one copy away from where the step reads them.

A bucket's rows are laid out as a rectangle. A sequence with fewer rows than the bucket is wide has its own at the end,
where attention that aligns the last query with the last key wants them; what is left over, rows and whole sequences,
is padding. Padding stores its keys and values in the scratch block, which is nobody's, and is never asked for logits;
padding sequences read nothing else, padding rows read no more than their own sequence's first row. Not here: what is
computed (`engine.cuda_graphs.static_attention`, `engine.model.llama_stack`). Called by `engine.cuda_graphs.steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.engine.base import SequenceSlice
from specdec.engine.cuda_graphs.buckets import Bucket
from specdec.engine.cuda_graphs.device_tables import CHANGES_PER_SEQUENCE, DeviceTables
from specdec.types import BLOCK_TOKENS

NumbersT = TypeVar("NumbersT", torch.Tensor, NDArray[np.int64])


class StepNumbers:
    """One allocation on the host and one on the device for the inputs of all buckets: one step runs at a time."""

    def __init__(self, size: int, device: torch.device) -> None:
        """size: of the largest bucket's inputs, see `input_size`."""
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=is_cuda)
        self.on_device = torch.zeros(size, dtype=torch.int64, device=device)
        self._copied = torch.cuda.Event() if is_cuda else None

    def writable(self) -> NDArray[np.int64]:
        """The numbers on the host, once the copy before has read them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy()

    def upload(self, count: int) -> None:
        """Copies the first `count` numbers in the order of the device's work, without waiting for it."""
        self.on_device[:count].copy_(self._host[:count], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.on_device.device))


class _Columns(NamedTuple, Generic[NumbersT]):
    """Views of a bucket's numbers."""

    token_ids: NumbersT  # [B, W]
    positions: NumbersT  # [B, W]
    slots: NumbersT  # [B, W]
    logit_rows: NumbersT  # [B, W], of which a step uses the first ones: rows of the rectangle
    opened_blocks: NumbersT  # [B]
    lengths: NumbersT  # [B]: tokens with KV once the step's are stored
    table_firsts: NumbersT  # [B]: where a sequence's block ids begin
    changed_at: NumbersT  # [B * CHANGES_PER_SEQUENCE]: entries of tables on the device, see `DeviceTables`
    changed_to: NumbersT  # likewise: their ids
    tables: NumbersT  # [B * N], where tables are not on the device


def input_size(bucket: Bucket, *, keeps_tables: bool) -> int:
    """How many numbers a step of a bucket has; `keeps_tables`: whether its tables are on the device."""
    return _first_table(bucket) + (0 if keeps_tables else bucket.num_blocks * bucket.num_sequences)


def _first_table(bucket: Bucket) -> int:
    return 4 * bucket.num_rows + (3 + 2 * CHANGES_PER_SEQUENCE) * bucket.num_sequences


def _lay_out(bucket: Bucket, numbers: NumbersT) -> _Columns[NumbersT]:
    B, W = bucket.num_sequences, bucket.width
    per_row = numbers[: 4 * B * W].reshape(4, B, W)
    first_change, first_table = 4 * B * W + 3 * B, _first_table(bucket)
    opened_blocks, lengths, table_firsts = numbers[4 * B * W : first_change].reshape(3, B)
    changed_at, changed_to = numbers[first_change:first_table].reshape(2, -1)
    tables = numbers[first_table : first_table + B * bucket.num_blocks]  # no numbers where there are none
    return _Columns(
        per_row[0], per_row[1], per_row[2], per_row[3], opened_blocks, lengths, table_firsts, changed_at, changed_to,
        tables,
    )  # fmt: skip


class StaticInputs:
    """What a step of one bucket reads: the tensors stay, `fill` changes what is in them."""

    def __init__(self, bucket: Bucket, numbers: StepNumbers, scratch_block: int, tables: DeviceTables | None) -> None:
        """
        Args:
            bucket: its size.
            numbers: where its numbers are, those of other buckets too.
            scratch_block: a block of the pool that no sequence ever has.
            tables: those on the device; None: a step brings its own, each as long as the bucket's contexts.
        """
        self.bucket = bucket
        self.tables = tables
        self.on_device = _lay_out(bucket, numbers.on_device)
        self._numbers = numbers
        self._scratch_block = scratch_block

    def fill(self, slices: Sequence[SequenceSlice]) -> None:
        """Takes a step that the bucket holds; no slice at all is a step of nothing but padding."""
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
            # Read behind the mask: another sequence's numbers must not enter the sum even there.
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
        # Blocks begun and not filled: what a former owner left in them is read behind the mask.
        last = ends - 1
        is_opened = (last - last % BLOCK_TOKENS >= starts) & (last % BLOCK_TOKENS < BLOCK_TOKENS - 1)
        columns.opened_blocks[:n][is_opened] = tables[firsts + last // BLOCK_TOKENS][is_opened]
        wanted = [
            row
            for end, piece in zip(range(W, n * W + 1, W), slices, strict=True)
            for row in range(end - piece.num_logit_rows, end)
        ]
        columns.logit_rows.reshape(-1)[: len(wanted)] = wanted
