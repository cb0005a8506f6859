"""A worker whose steps are one call into the compiled kernels.

It lays weights out as the kernels read them and a plan as the arrays they take (`engine/kernels/layout.h`); what a step
computes stands in `step.cpp` beside that. Weights that a shorter format holds exactly are kept in it
(`weight_formats`). Only Llama-shaped models that calculate in float32, on a CPU (`NativeRunner.fits`). Called by
`engine.loader`.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_int
from dataclasses import replace
from itertools import accumulate, chain
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from specdec.engine.base import ModelShape, MultiStepDrafts, SequenceSlice, StepPlan, Worker
from specdec.engine.linear.int8 import round_to_int8
from specdec.engine.model.batch import AttentionKind
from specdec.engine.model.early_exit import EarlyExit
from specdec.engine.model.kv_cache import KvCache
from specdec.engine.model.llama_shape import LlamaLayer, has_qk_norm
from specdec.engine.model.llama_stack import LlamaStack
from specdec.engine.model.model_runner import LocalHead
from specdec.engine.native.draft_head import NativeHead
from specdec.engine.native.packing import MOST_INT8_INPUTS, Packing
from specdec.engine.native.structures import Batch, DraftHead, Layer, Model, Product, Run
from specdec.types import BLOCK_TOKENS


def _require_range(values: Sequence[int], size: int, what: str, of_what: str) -> None:
    """Raises IndexError unless all are in [0, size)."""
    if min(values) < 0 or max(values) >= size:
        raise IndexError(f"a {what} is outside the {size} {of_what}")


def _with_room(piece: SequenceSlice, num_further: int) -> SequenceSlice:
    """The same tokens, with all blocks that further ones of their sequence lie in."""
    if piece.table is None:
        return piece
    end = piece.start + len(piece.token_ids) + num_further
    return replace(piece, block_table=tuple(piece.table[: -(-end // BLOCK_TOKENS)]))


class NativeRunner(Worker):
    """Implements `engine.base.Worker`. Not thread-safe: one step at a time."""

    def __init__(
        self,
        library: ctypes.CDLL,
        model: PreTrainedModel,
        cache: KvCache,
        kinds: list[AttentionKind],
        shape: ModelShape,
        exits: Mapping[str, EarlyExit] = MappingProxyType({}),
        heads: Mapping[str, LocalHead] = MappingProxyType({}),
        *,
        is_int8: bool,
        is_compact: bool,
    ) -> None:
        """Takes the weights of `model` over layer by layer; the model cannot run afterwards. See `fits`.

        Args:
            library: the kernels.
            model: on a CPU, in float32.
            cache: the KV pool.
            kinds: how each layer attends.
            shape: what is told of the worker.
            exits: where draft steps end, by the name of the local draft.
            heads: what runs draft steps by itself, likewise.
            is_int8: round the layers' weights to integers.
            is_compact: keep weights in the shortest format that holds them exactly; the logits have the same bits
                either way.
        """
        self.shape = shape
        self._library = library
        library.specdec_step.argtypes = [POINTER(Model), POINTER(Batch), c_int]
        library.specdec_run.argtypes = [POINTER(Model), POINTER(Batch), POINTER(Run), c_int]
        library.specdec_draft.argtypes = [POINTER(DraftHead), POINTER(Batch), c_int]
        self._cache = cache
        self._packing = Packing(library, is_compact=is_compact)
        self._max_queries: int = library.specdec_max_queries()
        self._num_embeddings = cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0]
        self._model = self._describe_model(model, kinds, is_int8)
        self._drafts = {name: self._describe_exit(early_exit, model.lm_head) for name, early_exit in exits.items()}
        self._tapped = tuple(sorted({layer for head in heads.values() for layer in head.feature_layers}))
        self._model.num_tapped = len(self._tapped)
        self._model.tapped = self._packing.keep(torch.tensor(self._tapped, dtype=torch.int64))
        self._native_heads = self._take_heads(heads)
        self._heads = {name: head for name, head in heads.items() if name not in self._native_heads}
        """Those that are computed in PyTorch."""
        # A head is told of every step; and nothing checks an id that the kernels choose.
        if not heads and shape.vocabulary_size <= min(self._num_embeddings, self._model.head.outputs):
            self.draft_runs = MultiStepDrafts.GREEDY
        self._row_sizes = self._measure_rows()
        self._batch = Batch()
        self._numbers = array("q")
        """What `_batch` points into, as it does into the next."""
        self._scratch = torch.empty(0)
        self._run_logits = torch.empty(0)
        self._placed = (0, 0, 0)
        """Tokens, score columns and threads that `_batch` has working memory for."""

    @staticmethod
    def fits(library: ctypes.CDLL, model: PreTrainedModel) -> bool:
        """Whether the kernels compute this model."""
        if not LlamaStack.fits(model) or model.device.type != "cpu" or model.dtype != torch.float32:
            return False
        attention = model.model.layers[0].self_attn
        fits = library.specdec_fits(attention.q_proj.in_features, attention.head_dim)
        widest = max(attention.q_proj.in_features, attention.q_proj.out_features, model.config.intermediate_size)
        return bool(fits) and widest <= MOST_INT8_INPUTS and model.config.hidden_act in ("silu", "swish")

    @staticmethod
    def round_weight(weight: torch.Tensor) -> torch.Tensor:
        """What a weight [out, in] is multiplied as, where weights are int8."""
        return round_to_int8(weight).rounded()

    @property
    def weight_bytes(self) -> int:
        """What is read of memory for the weights, all of them: embeddings and tables of positions included."""
        return self._packing.num_bytes

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Runs one step; see `engine.base.Worker.execute`."""
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
        """Runs a step and those that follow it; see `engine.base.Worker.draft_greedy`."""
        batch, model, num_slices = self._batch, self._model, len(plan.slices)
        ends = [piece.start + len(piece.token_ids) for piece in plan.slices]
        slices = [_with_room(piece, num_steps - 1) for piece in plan.slices]
        self._check(slices, num_steps - 1)
        if plan.block_copies or plan.local_draft or any(piece.num_logit_rows != 1 for piece in slices):
            raise ValueError("a run begins with a full step of one logit row a slice, without copies")
        rows, starts = range(num_slices + 1), [end + step for step in range(num_steps - 1) for end in ends]
        chosen = [0] * num_steps * num_slices
        self._numbers, (run_rows, run_starts, run_chosen) = self._place_numbers(slices, rows, starts, chosen)
        num_threads = torch.get_num_threads()
        self._place_scratch(batch.tokens, max(ends) + num_steps - 1, num_threads)
        width = self._packing.padded(model.head.outputs)
        if self._run_logits.numel() < num_slices * width:
            self._run_logits = torch.empty(num_slices * width)
        batch.logits = self._run_logits.data_ptr()
        maxima = np.empty((num_steps, num_slices), dtype=np.float32)
        run = Run(num_steps, self.shape.vocabulary_size, run_rows, run_starts, run_chosen, maxima.ctypes.data)
        self._library.specdec_run(ctypes.byref(model), ctypes.byref(batch), ctypes.byref(run), num_threads)
        numbers = np.frombuffer(self._numbers, dtype=np.int64)
        return maxima, numbers[-len(chosen) :].reshape(maxima.shape)

    def _take_heads(self, heads: Mapping[str, LocalHead]) -> dict[str, NativeHead]:
        """Those that the kernels compute; a full step writes for them from now on."""
        taken = {}
        for name, head in heads.items():
            layer = head.layer
            if layer is not None and NativeHead.fits(self._library, layer, self._model, self._num_embeddings):
                taps = [self._tapped.index(tapped) for tapped in head.feature_layers]
                taken[name] = NativeHead(self._packing, layer, head.cached, taps)
        self._draft_heads = (DraftHead * len(taken))(*(head.structure for head in taken.values()))
        self._model.draft_heads = ctypes.addressof(self._draft_heads)
        self._model.num_draft_heads = len(taken)
        return taken

    def _tell_heads(self, plan: StepPlan, outputs: torch.Tensor) -> None:
        """outputs [tapped layers, T, hidden] of a full step."""
        with torch.inference_mode():
            for head in self._heads.values():
                head.note_step(plan, [outputs[self._tapped.index(layer)] for layer in head.feature_layers])

    def read_blocks(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """Copies KV blocks out; see `engine.base.Worker.read_blocks`."""
        return self._cache.copies.read(block_ids)

    def write_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Copies KV blocks in; see `engine.base.Worker.write_blocks`."""
        self._cache.copies.write(block_ids, rows)

    def _place_numbers(self, slices: Sequence[SequenceSlice], *more: Sequence[int]) -> tuple[array[int], list[int]]:
        """Points the batch at a plan's numbers; returns what holds them, `more` at its end, and where each of those is.

        They lie in one array: a draft step is so short that making six would show. It is none of NumPy's, which would
        take longer, above all where the caches are cold.
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
        _require_range(columns["token_ids"], self._num_embeddings, "token id", "embeddings")
        _require_range(columns["tables"], self._cache.num_blocks, "block of the plan", "KV blocks")
        numbers = array("q", [*chain(*columns.values(), *more)])
        batch, (address, _) = self._batch, numbers.buffer_info()
        for name, column in columns.items():
            setattr(batch, name, address)
            address += len(column) * numbers.itemsize
        batch.tokens, batch.sequences, batch.logit_rows = first_rows[-1], len(slices), len(columns["rows_wanted"])
        places = accumulate((len(column) * numbers.itemsize for column in more[:-1]), initial=address)
        return numbers, list(places)

    def _check(self, slices: Sequence[SequenceSlice], num_further: int = 0) -> None:
        """Raises IndexError where a slice, with so many further tokens, reaches beyond what it names: the kernels would
        read and write there.
        """
        for piece in slices:
            count = len(piece.token_ids)
            end = piece.start + count + num_further
            most = min(len(piece.block_table) * BLOCK_TOKENS, self.shape.max_context_tokens)
            if not (piece.start >= 0 and end <= most and 0 <= piece.num_logit_rows <= count):
                raise IndexError(
                    f"a plan of {piece.num_logit_rows} logit rows for tokens {piece.start} to {end} in "
                    f"{len(piece.block_table)} blocks and a context of {self.shape.max_context_tokens}"
                )

    def _place_scratch(self, tokens: int, longest: int, num_threads: int) -> None:
        """Gives a step its working memory, which is kept for the next."""
        # One block more: a window begins within a block, and a tile of queries ends in another.
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
        """Working memory of each token, in float32 numbers: as much as the widest of the models needs."""
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

    def _describe_model(self, model: PreTrainedModel, kinds: list[AttentionKind], is_int8: bool) -> Model:
        inner = model.model
        first = inner.layers[0].self_attn
        layers = (Layer * len(inner.layers))()
        for index, kind in enumerate(kinds):
            layers[index] = self._describe_layer(inner.layers[index], index, kind, is_int8)
            inner.layers[index] = nn.Identity()
        positions = torch.arange(self.shape.max_context_tokens).unsqueeze(0)
        with torch.inference_mode():
            cosines, sines = inner.rotary_emb(torch.empty(0), positions)
        qk_norm = getattr(first, "q_norm", inner.norm)
        embeddings, embedding_format = self._packing.embedding(inner.embed_tokens.weight)
        self._layers = layers
        return Model(
            layers=layers,
            num_layers=len(layers),
            hidden=first.q_proj.in_features,
            heads=first.q_proj.out_features // first.head_dim,
            kv_heads=first.k_proj.out_features // first.head_dim,
            head_dim=first.head_dim,
            mlp=model.config.intermediate_size,
            embeddings=embeddings,
            embedding_format=embedding_format,
            cosines=self._packing.keep(cosines[0]),
            sines=self._packing.keep(sines[0]),
            final_gains=self._packing.keep(inner.norm.weight),
            # The logits stay exact: rounded, the best two would tie.
            head=self._describe_product([model.lm_head], is_int8=False),
            epsilon=inner.norm.variance_epsilon,
            qk_epsilon=qk_norm.variance_epsilon,
            scaling=first.scaling,
        )

    def _describe_exit(self, early_exit: EarlyExit, head: nn.Linear) -> Model:
        """The same model with fewer layers, and the adapter multiplied into its head."""
        short = Model.from_buffer_copy(self._model)
        short.num_layers = early_exit.num_layers  # and no layer tapped
        if early_exit.adapter is not None:
            adapted = nn.Linear(head.in_features, head.out_features, device="meta")
            weight, bias = early_exit.adapter.of_head(head.weight.detach(), head.bias)
            adapted.weight = nn.Parameter(weight, requires_grad=False)
            adapted.bias = nn.Parameter(bias, requires_grad=False)
            short.head = self._describe_product([adapted], is_int8=False)
        return short

    def _describe_layer(self, layer: LlamaLayer, index: int, kind: AttentionKind, is_int8: bool) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qk_gains = None
        if has_qk_norm(attention):
            heads = attention.q_proj.out_features // attention.head_dim
            kv_heads = attention.k_proj.out_features // attention.head_dim
            q, k = attention.q_norm.weight, attention.k_norm.weight
            qk_gains = self._packing.keep(torch.cat((q.expand(heads, -1), k.expand(kv_heads, -1))))
        return Layer(
            qkv=self._describe_product([attention.q_proj, attention.k_proj, attention.v_proj], is_int8),
            output=self._describe_product([attention.o_proj], is_int8),
            gate_up=self._describe_product([mlp.gate_proj, mlp.up_proj], is_int8),
            down=self._describe_product([mlp.down_proj], is_int8),
            attention_gains=self._packing.keep(layer.input_layernorm.weight),
            mlp_gains=self._packing.keep(layer.post_attention_layernorm.weight),
            qk_gains=qk_gains,
            cache=self._cache.layers[index].rows.data_ptr(),
            window=kind.window or 0,
        )

    def _describe_product(self, linears: list[nn.Linear], is_int8: bool) -> Product:
        """One product whose outputs are those of several layers that share their input, side by side."""
        weight = torch.cat([linear.weight.detach() for linear in linears])  # [outputs, inputs]
        bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
        return self._packing.product(weight, bias, is_int8=is_int8)
