"""Steps that no CUDA graph holds, such as chunks of prompts and many sessions at once, with the paged kernels.

Eager attention would gather the contexts of such a step and mask them for every row and head, which takes gigabytes
behind a long prefix. The paged kernels read blocks in place and keep partial sums of a few rows at a time. A prompt
that runs alone from its first token has all its keys in the step, so `engine.model.attention` runs it. Called by
`engine.cuda_graphs.graph_steps`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice
from specdec.engine.cuda_graphs import paged_attention as kernels
from specdec.engine.cuda_graphs.paged_attention import RaggedRows
from specdec.engine.model.batch import AttentionKind, StepBatch, opened_blocks
from specdec.engine.model.kv_cache import KvCache
from specdec.engine.model.llama_stack import StepPass
from specdec.engine.model.model_runner import LayerOutputs

# Rows of one launch: their partial sums take 134 MB for 32 heads of 128 numbers.
_MOST_ROWS = 512


class RaggedSteps:
    """Runs steps of any shape on one model, without recording them."""

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
            step_pass: the model's forward pass.
            cache: the KV pool.
            layer_kinds: the attention kind of each layer.
            takes_whole_prompts: whether to run a single whole prompt too, instead of leaving it to the eager attention,
                which sums in another order.
        """
        self._pass = step_pass
        self._cache = cache
        self._layer_kinds = tuple(layer_kinds)
        self._takes_whole_prompts = takes_whole_prompts

    def run(self, slices: Sequence[SequenceSlice]) -> tuple[torch.Tensor, LayerOutputs] | None:
        """Run a step, within inference mode.

        Returns:
            Logits [R, rows of the output head] and the outputs of the tapped layers; None if the step was left to the
            eager pass.
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
    """Inputs of a step on the host, its T rows in the order of the slices."""

    positions: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T]
    tables: NDArray[np.int64]
    table_firsts: NDArray[np.int64]  # [number of slices]
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
    """Yield each launch of at most `_MOST_ROWS` rows: first row, sequences, their lengths, first rows in the launch."""
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
    """One step's attention in several launches; see `engine.model.attention.RowContext`."""

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
            kernels.paged_attention(query[part], layer, kind, rows, scale=scale, softcap=softcap)
            for part, rows in self.launches
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
