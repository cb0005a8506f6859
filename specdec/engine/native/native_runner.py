"""A worker whose steps are one call into the compiled kernels.

It supports Llama-shaped models that compute in float32 on a CPU (`model_layout.fits`). Weights are laid out by
`model_layout` and `draft_head`, or were kept by `kept_layout`; a plan becomes the arrays of `engine/kernels/layout.h`,
and `step.cpp` beside it computes the step. Called by `engine.loader` and `engine.kept_worker`.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_int
from dataclasses import replace
from itertools import accumulate, chain
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import ModelShape, MultiStepDrafts, SequenceSlice, StepPlan, Worker
from specdec.engine.model.kv_cache import KvCache, LayerShape
from specdec.engine.native.draft_head import NativeHead
from specdec.engine.native.packing import PackedModel
from specdec.engine.native.structures import Batch, HeadStructure, Model, MultiStep

if TYPE_CHECKING:  # with it come the modules of transformers, which kept layouts are loaded without
    from specdec.engine.model.model_runner import LocalHead


def _require_range(values: Sequence[int], size: int, name: str) -> None:
    """Raise IndexError unless all values are in [0, size)."""
    for value in (min(values), max(values)):
        if not 0 <= value < size:
            raise IndexError(f"{name} {value} is not in 0..{size - 1}")


def _with_room(piece: SequenceSlice, num_further: int) -> SequenceSlice:
    """Return the slice with the block ids that `num_further` more tokens need."""
    if piece.table is None:
        return piece
    end = piece.start + len(piece.token_ids) + num_further
    return replace(piece, block_table=tuple(piece.table[: -(-end // BLOCK_TOKENS)]))


class NativeRunner(Worker):
    """Implements `engine.base.Worker`. Not thread-safe: one step at a time."""

    def __init__(
        self,
        library: ctypes.CDLL,
        packed: PackedModel,
        cache: KvCache,
        shape: ModelShape,
        exits: Mapping[str, Model] = MappingProxyType({}),
        heads: Mapping[str, LocalHead] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            library: the compiled kernels.
            packed: the model, whose layers write into `cache`.
            cache: the KV pool.
            shape: the worker's shape.
            exits: early exits of the model, by the name of the local draft.
            heads: draft heads, by the name of the local draft.
        """
        self.shape = shape
        self._library = library
        library.specdec_step.argtypes = [POINTER(Model), POINTER(Batch), c_int]
        library.specdec_multi_step.argtypes = [POINTER(Model), POINTER(Batch), POINTER(MultiStep), c_int]
        library.specdec_draft.argtypes = [POINTER(HeadStructure), POINTER(Batch), c_int]
        self._cache = cache
        self.packed = packed
        """The model; what it holds lives as long as it."""
        self._packing = packed.packing
        self._max_queries: int = library.specdec_max_queries()
        self._num_embeddings = packed.num_embeddings
        self._model = packed.model
        self._drafts = exits
        self._tapped = tuple(sorted({layer for head in heads.values() for layer in head.feature_layers}))
        self._model.num_tapped = len(self._tapped)
        self._model.tapped = self._packing.keep(torch.tensor(self._tapped, dtype=torch.int64))
        self._native_heads = self._take_heads(heads)
        self._heads = {name: head for name, head in heads.items() if name not in self._native_heads}
        """Draft heads that PyTorch computes."""
        # A multi-step draft does not report its steps to heads, and the token ids that it chooses must have embeddings.
        if not heads and shape.vocabulary_size <= min(self._num_embeddings, self._model.head.outputs):
            self.multi_step_drafts = MultiStepDrafts.GREEDY
        self._row_sizes = self._measure_rows()
        self._batch = Batch()
        self._numbers = array("q")
        """Arrays that `_batch` points into."""
        self._scratch = torch.empty(0)
        self._multi_step_logits = torch.empty(0)
        self._placed = (0, 0, 0)
        """Numbers of tokens, score columns and threads that the working memory of `_batch` is laid out for."""

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """Return the sizes of what each layer caches."""
        return [layer.shape for layer in self._cache.layers]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, including the embeddings and the rotary tables."""
        return self._packing.num_bytes

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Run one step; see `engine.base.Worker.execute`."""
        slices, batch = plan.slices, self._batch
        self._check(slices)
        if plan.local_draft in self._heads:
            with torch.inference_mode():
                return self._heads[plan.local_draft].draft(plan).to(torch.float32, copy=True)
        native_head = self._native_heads.get(plan.local_draft)
        if native_head is not None:
            model = native_head.structure.model
        else:
            model = self._drafts[plan.local_draft] if plan.local_draft else self._model
        self._numbers, _ = self._place_numbers(slices)
        num_threads = torch.get_num_threads()
        longest = max(piece.start + len(piece.token_ids) for piece in slices)
        self._place_scratch(batch.tokens, longest, num_threads)
        logits = torch.empty(batch.logit_rows, self._packing.padded(model.head.outputs))
        batch.logits = logits.data_ptr()
        if native_head is not None:
            self._library.specdec_draft(ctypes.byref(native_head.structure), ctypes.byref(batch), num_threads)
            return native_head.widen(logits[:, : model.head.outputs]).contiguous()
        outputs = None
        if model.num_tapped:
            outputs = torch.empty(model.num_tapped, batch.tokens, model.hidden)
            batch.outputs = outputs.data_ptr()
        if plan.block_copies:
            self._cache.copy_blocks(plan.block_copies)
        self._library.specdec_step(ctypes.byref(model), ctypes.byref(batch), num_threads)
        if outputs is not None:
            self._tell_heads(plan, outputs)
        if logits.shape[1] == self.shape.vocabulary_size:
            return logits
        return logits[:, : self.shape.vocabulary_size].contiguous()

    def draft_greedy(self, plan: StepPlan, num_steps: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Run a multi-step draft; see `engine.base.Worker.draft_greedy`."""
        batch, model, num_slices = self._batch, self._model, len(plan.slices)
        ends = [piece.start + len(piece.token_ids) for piece in plan.slices]
        slices = [_with_room(piece, num_steps - 1) for piece in plan.slices]
        self._check(slices, num_steps - 1)
        if plan.block_copies or plan.local_draft or any(piece.num_logit_rows != 1 for piece in slices):
            raise ValueError("a multi-step draft needs a full step with one logit row per slice and no block copies")
        rows, starts = range(num_slices + 1), [end + step for step in range(num_steps - 1) for end in ends]
        chosen = [0] * num_steps * num_slices
        self._numbers, (rows_at, starts_at, chosen_at) = self._place_numbers(slices, rows, starts, chosen)
        num_threads = torch.get_num_threads()
        self._place_scratch(batch.tokens, max(ends) + num_steps - 1, num_threads)
        width = self._packing.padded(model.head.outputs)
        if self._multi_step_logits.numel() < num_slices * width:
            self._multi_step_logits = torch.empty(num_slices * width)
        batch.logits = self._multi_step_logits.data_ptr()
        maxima = np.empty((num_steps, num_slices), dtype=np.float32)
        vocabulary_size = self.shape.vocabulary_size
        multi_step = MultiStep(num_steps, vocabulary_size, rows_at, starts_at, chosen_at, maxima.ctypes.data)
        self._library.specdec_multi_step(
            ctypes.byref(model), ctypes.byref(batch), ctypes.byref(multi_step), num_threads
        )
        numbers = np.frombuffer(self._numbers, dtype=np.int64)
        return maxima, numbers[-len(chosen) :].reshape(maxima.shape)

    def _take_heads(self, heads: Mapping[str, LocalHead]) -> dict[str, NativeHead]:
        """Return the heads that the kernels compute; full steps write their features and KV from now on."""
        taken = {}
        for name, head in heads.items():
            layer = head.layer
            if layer is not None and NativeHead.fits(self._library, layer, self._model, self._num_embeddings):
                taps = [self._tapped.index(tapped) for tapped in head.feature_layers]
                taken[name] = NativeHead(self._packing, layer, head.cached, taps)
        self._draft_heads = (HeadStructure * len(taken))(*(head.structure for head in taken.values()))
        self._model.draft_heads = ctypes.addressof(self._draft_heads)
        self._model.num_draft_heads = len(taken)
        return taken

    def _tell_heads(self, plan: StepPlan, outputs: torch.Tensor) -> None:
        """Report a full step to the heads in PyTorch; `outputs` is [tapped layers, T, hidden]."""
        with torch.inference_mode():
            for head in self._heads.values():
                head.note_step(plan, [outputs[self._tapped.index(layer)] for layer in head.feature_layers])

    def read_blocks(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """Copy KV blocks out; see `engine.base.Worker.read_blocks`."""
        return self._cache.copies.read(block_ids)

    def write_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Copy KV blocks in; see `engine.base.Worker.write_blocks`."""
        self._cache.copies.write(block_ids, rows)

    def _place_numbers(self, slices: Sequence[SequenceSlice], *more: Sequence[int]) -> tuple[array[int], list[int]]:
        """Lay a plan out in one array and point the batch at its columns.

        One array instead of six, and `array.array` instead of NumPy, because a draft step is so short that allocating
        more would take a visible part of it.

        Returns:
            The array, with `more` at its end, and the address of each column of `more`.
        """
        first_rows = [0, *accumulate(len(piece.token_ids) for piece in slices)]
        columns = {
            "first_row": first_rows,
            "start": [piece.start for piece in slices],
            "tables": [block for piece in slices for block in piece.block_table],
            "table_offset": [0, *accumulate(len(piece.block_table) for piece in slices)],
            "rows_wanted": [
                row
                for piece, end in zip(slices, first_rows[1:], strict=True)
                for row in range(end - piece.num_logit_rows, end)
            ],
            "token_ids": [token for piece in slices for token in piece.token_ids],
        }
        _require_range(columns["token_ids"], self._num_embeddings, "token id")
        _require_range(columns["tables"], self._cache.num_blocks, "KV block")
        numbers = array("q", [*chain(*columns.values(), *more)])
        batch, (address, _) = self._batch, numbers.buffer_info()
        for name, column in columns.items():
            setattr(batch, name, address)
            address += len(column) * numbers.itemsize
        batch.tokens, batch.sequences, batch.logit_rows = first_rows[-1], len(slices), len(columns["rows_wanted"])
        places = accumulate((len(column) * numbers.itemsize for column in more[:-1]), initial=address)
        return numbers, list(places)

    def _check(self, slices: Sequence[SequenceSlice], num_further: int = 0) -> None:
        """Raise IndexError if a slice with `num_further` more tokens exceeds its blocks or the model's context.

        The kernels do not check and would access memory outside their arrays.
        """
        for piece in slices:
            count = len(piece.token_ids)
            end = piece.start + count + num_further
            most = min(len(piece.block_table) * BLOCK_TOKENS, self.shape.max_context_tokens)
            if not (piece.start >= 0 and end <= most and 0 <= piece.num_logit_rows <= count):
                raise IndexError(
                    f"a slice of {count} tokens from {piece.start} to {end} with {piece.num_logit_rows} logit rows "
                    f"does not fit into {len(piece.block_table)} KV blocks and a context of "
                    f"{self.shape.max_context_tokens}"
                )

    def _place_scratch(self, tokens: int, longest: int, num_threads: int) -> None:
        """Point the batch at working memory for a step; it is kept for later steps."""
        # One block more than the context: a tile's first and last key may both lie within a block.
        scores_width = (longest // BLOCK_TOKENS + 2) * BLOCK_TOKENS
        if (tokens, scores_width, num_threads) == self._placed:
            return
        batch = self._batch
        sizes = {name: tokens * size for name, size in self._row_sizes.items()}
        sizes["scores"] = num_threads * self._max_queries * scores_width
        total = sum(sizes.values())
        if self._scratch.numel() < total:
            self._scratch = torch.empty(total)
        batch.scores_width = scores_width
        address = self._scratch.data_ptr()
        for name, size in sizes.items():
            setattr(batch, name, address)
            address += size * self._scratch.itemsize
        self._placed = tokens, scores_width, num_threads

    def _measure_rows(self) -> dict[str, int]:
        """Return the working memory per token, in float32 numbers, that the largest of the models needs."""
        models = [self._model, *(head.structure.model for head in self._native_heads.values())]
        padded, group = self._packing.padded, self._packing.group
        widest = max(max(model.hidden, model.heads * model.head_dim, model.mlp) for model in models)
        in_groups = -(-widest // group) * group
        return {
            "hidden": self._model.hidden,
            "normed": self._model.hidden,
            "qkv": max(padded((model.heads + 2 * model.kv_heads) * model.head_dim) for model in models),
            "attended": max(model.heads * model.head_dim for model in models),
            "gate_up": max(padded(2 * model.mlp) for model in models),
            "joined": max((head.num_inputs for head in self._native_heads.values()), default=0),
            "row_scales": 1,
            "integers": 2 * in_groups // torch.float32.itemsize,
        }
