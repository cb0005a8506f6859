"""Consecutive draft steps on the device, without reading a result between them.

The graph of a step with one row per sequence is replayed repeatedly. Between two replays one kernel makes the drawn
tokens the graph's input and moves every sequence one position on, using the block tables on the device. Tokens are
drawn by `engine.drafting`. Called by `engine.cuda_graphs.graph_steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice
from specdec.engine.cuda_graphs.buckets import MOST_SEQUENCES
from specdec.engine.cuda_graphs.static_inputs import StaticInputs


def last_tokens(slices: Sequence[SequenceSlice]) -> list[SequenceSlice]:
    """Return the slices reduced to their last token."""
    return [
        replace(piece, token_ids=piece.token_ids[-1:], start=piece.start + len(piece.token_ids) - 1) for piece in slices
    ]


class MultiStepReplay:
    """Replays a graph for the tokens that follow a step."""

    def __init__(
        self, inputs: StaticInputs, replay: Callable[[], None], num_sequences: int, scratch_block: int
    ) -> None:
        """
        Args:
            inputs: inputs of a graph with one row per sequence, filled with each sequence's last token.
            replay: launches the graph.
            num_sequences: number of sequences that are not padding.
            scratch_block: block that no sequence has.
        """
        self._inputs = inputs
        self._replay = replay
        self._num_sequences = num_sequences
        self._scratch_block = scratch_block

    def run(self, token_ids: torch.Tensor) -> None:
        """Run the next token of each sequence: int64 [num_sequences] on the device."""
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
