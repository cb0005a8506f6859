"""Steps that no recording holds, through the kernels of the recorded ones: chunks of prompts, many sessions at once.

Gathering such a step's contexts, and masking them for every row and head, takes memory that nobody has set aside:
gigabytes behind a long prefix. The kernels read blocks where they lie and keep partial sums of a few rows at a time.
Not here: a lone prompt from its first token on, whose keys are all in the step (`engine.model.attention`). Called by
`engine.cuda_graphs.steps`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.engine.base import SequenceSlice
from specdec.engine.cuda_graphs import paged_attention as kernels
from specdec.engine.cuda_graphs.paged_attention import RaggedRows
from specdec.engine.model.batch import AttentionKind, StepBatch, opened_blocks
from specdec.engine.model.kv_cache import KvCache
from specdec.engine.model.llama_stack import StepPass
from specdec.engine.model.model_runner import LayerOutputs
from specdec.types import BLOCK_TOKENS

# Of one launch: their partial sums take 134 MB with 32 heads of 128.
_MOST_ROWS = 512


class RaggedSteps:
    """Runs steps of any shape on one model; not recorded."""

    def __init__(
        self,
        step_pass: StepPass,
        cache: KvCache,
        layer_kinds: Sequence[AttentionKind],
        *,
        takes_whole_prompts: bool = False,
    ) -> None:
        """
        Args:
            step_pass: of the model.
            cache: the pool.
            layer_kinds: of its layers.
            takes_whole_prompts: rather than leave a lone prompt to another attention, which adds up in another order.
        """
        self._pass = step_pass
        self._cache = cache
        self._layer_kinds = tuple(layer_kinds)
        self._takes_whole_prompts = takes_whole_prompts

    def run(self, slices: Sequence[SequenceSlice]) -> tuple[torch.Tensor, LayerOutputs] | None:
        """Runs a step, within inference mode.

        Returns:
            [R, rows of the model's head] logits, and what layers put out; None: nothing was run, as the eager pass is
            better at it.
        """
        if len(slices) == 1 and slices[0].start == 0 and not self._takes_whole_prompts:
            return None
        device = self._cache.layers[0].blocks.device
        numbers = _Numbers.of(slices)
        batch = StepBatch(
            token_ids=_on_device([[token_id for piece in slices for token_id in piece.token_ids]], device),
            position_ids=_on_device(numbers.positions[None], device),
            slots=_on_device(numbers.slots, device),
            opened_blocks=opened_blocks(numbers.slots, device),
            logit_rows=_on_device(numbers.logit_rows, device),
            groups=(),
        )
        tables, firsts = _on_device(numbers.tables, device), numbers.table_firsts
        launches = []
        for first_row, sequences, lengths, first_rows in _launches(slices):
            rows = RaggedRows(
                first_rows=_on_device(first_rows, device).to(torch.int32),
                lengths=_on_device(lengths, device),
                tables=tables,
                table_firsts=_on_device(firsts[sequences], device),
            )
            launches.append((slice(first_row, first_row + first_rows[-1]), rows))
        logits, outputs = self._pass(batch, _LaunchedContext(batch, self._cache, self._layer_kinds, launches))
        return logits, LayerOutputs(outputs, batch.slots)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A step on the host, its T rows in the order of the slices."""

    positions: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T]
    tables: NDArray[np.int64]
    table_firsts: NDArray[np.int64]  # one a slice
    logit_rows: NDArray[np.int64]

    @classmethod
    def of(cls, slices: Sequence[SequenceSlice]) -> _Numbers:
        counts = np.array([len(piece.token_ids) for piece in slices])
        ends = np.array([piece.start for piece in slices]) + counts
        num_blocks = -(-ends // BLOCK_TOKENS)
        tables = np.concatenate(
            [np.asarray(piece.block_table[:count]) for piece, count in zip(slices, num_blocks, strict=True)]
        )
        firsts, last_rows = np.cumsum(num_blocks) - num_blocks, np.cumsum(counts)
        positions = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
        blocks = tables[np.repeat(firsts, counts) + positions // BLOCK_TOKENS]
        logit_rows = [np.arange(end - piece.num_logit_rows, end) for end, piece in zip(last_rows, slices, strict=True)]
        slots = blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS
        return cls(positions, slots, tables, firsts, np.concatenate(logit_rows))


def _launches(slices: Sequence[SequenceSlice]) -> Iterator[tuple[int, list[int], list[int], list[int]]]:
    """First row, sequences, their lengths and first rows within the launch: at most `_MOST_ROWS` rows each."""
    first_row, sequences, lengths, first_rows = 0, list[int](), list[int](), [0]
    for index, piece in enumerate(slices):
        done = 0
        while done < len(piece.token_ids):
            count = min(len(piece.token_ids) - done, _MOST_ROWS - first_rows[-1])
            done += count
            sequences.append(index)
            lengths.append(piece.start + done)
            first_rows.append(first_rows[-1] + count)
            if first_rows[-1] == _MOST_ROWS:
                yield first_row, sequences, lengths, first_rows
                first_row, sequences, lengths, first_rows = first_row + _MOST_ROWS, [], [], [0]
    if sequences:
        yield first_row, sequences, lengths, first_rows


def _on_device(numbers: NDArray[np.int64] | list[int] | list[list[int]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.asarray(numbers, dtype=np.int64)).to(device)


@dataclass(frozen=True, slots=True)
class _LaunchedContext:
    """One step's attention, launch by launch; see `engine.model.attention.RowContext`."""

    batch: StepBatch
    cache: KvCache
    layer_kinds: tuple[AttentionKind, ...]
    launches: list[tuple[slice, RaggedRows]]

    def attend_rows(
        self, layer_index: int, query: torch.Tensor, kv_rows: torch.Tensor, scale: float, softcap: float | None
    ) -> torch.Tensor:
        layer = self.cache.layers[layer_index]
        if self.batch.opened_blocks is not None:
            layer.clear(self.batch.opened_blocks)
        layer.write(self.batch.slots, kv_rows)
        return self.attend(layer_index, query, scale, softcap)

    def attend(self, layer_index: int, query: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
        """See `engine.cuda_graphs.fused_stack.StoredContext`."""
        layer, kind = self.cache.layers[layer_index], self.layer_kinds[layer_index]
        outputs = [
            kernels.paged_attention(query[own], layer, kind, rows, scale=scale, softcap=softcap)
            for own, rows in self.launches
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
