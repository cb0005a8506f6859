"""Draft steps that follow one another on the device: no number of one is read before the next is begun.

A step of one row a sequence is replayed over and over; in between one kernel makes the drawn tokens its input and moves
every sequence one position on, through the block tables on the device. Not here: what is drawn (`engine.drafting`), the
recordings (`engine.cuda_graphs.steps`, which makes these).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from specdec.engine.base import SequenceSlice
from specdec.engine.cuda_graphs.buckets import MOST_SEQUENCES
from specdec.engine.cuda_graphs.static_inputs import StaticInputs
from specdec.types import BLOCK_TOKENS


def last_tokens(slices: Sequence[SequenceSlice]) -> list[SequenceSlice]:
    """The same sequences at their last tokens alone."""
    return [
        replace(piece, token_ids=piece.token_ids[-1:], start=piece.start + len(piece.token_ids) - 1) for piece in slices
    ]


class MultiStepReplay:
    """Further steps of the sequences of a step that has been begun."""

    def __init__(
        self, inputs: StaticInputs, replay: Callable[[], None], num_sequences: int, scratch_block: int
    ) -> None:
        """
        Args:
            inputs: of a bucket of one row a sequence, filled with each sequence's last token.
            replay: runs it.
            num_sequences: how many are not padding.
            scratch_block: which nobody has.
        """
        self._inputs = inputs
        self._replay = replay
        self._num_sequences = num_sequences
        self._scratch_block = scratch_block

    def run(self, token_ids: torch.Tensor) -> None:
        """Runs one token of each sequence, the one after its last; int64 [num_sequences] on the device."""
        from specdec.engine.cuda_graphs.draft_kernels import advance

        columns, tables = self._inputs.on_device, self._inputs.tables
        assert tables is not None
        with torch.cuda.device_of(token_ids):
            advance[(1,)](
                token_ids, columns.token_ids, columns.positions, columns.slots, columns.opened_blocks, columns.lengths,
                columns.table_firsts, tables.on_device, self._num_sequences, self._scratch_block,
                PAGE_TOKENS=BLOCK_TOKENS, TILE=MOST_SEQUENCES, num_warps=1,
            )  # fmt: skip
        self._replay()
