"""A worker whose steps are one call into the compiled kernels.

It lays weights out as the kernels read them and a plan as the arrays they take (`layout.h`); what a step computes
stands in `step.cpp`. Weights that a shorter format holds exactly are kept in it (`weight_formats`). Only Llama-shaped
models that calculate in float32, on a CPU (`NativeRunner.fits`). Called by `engine.loader`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_int
from itertools import accumulate, chain
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from specdec.engine.base import ModelShape, SequenceSlice, StepPlan, Worker
from specdec.engine.model.batch import AttentionKind
from specdec.engine.model.early_exit import EarlyExit
from specdec.engine.model.kv_cache import KvCache
from specdec.engine.model.llama_shape import LlamaLayer, has_qk_norm
from specdec.engine.model.llama_stack import LlamaStack
from specdec.engine.model.model_runner import LocalHead
from specdec.engine.native.structures import Batch, Layer, Model, Product
from specdec.engine.native.weight_formats import FORMAT_OF, Format, halved, pack, pack_shortest
from specdec.types import BLOCK_TOKENS

_LARGEST_INT8 = 127
#: Of a row as integers: the kernels take bytes of 0..255, and this one is 0 (`ZERO` in `layout.h`).
_ZERO_BYTE = 128
#: Beyond, the sums of an output's products would leave 32 bits.
_MOST_INT8_INPUTS = (1 << 31) // (255 * _LARGEST_INT8)


def _require_range(values: Sequence[int], size: int, what: str, of_what: str) -> None:
    """Raises IndexError unless all are in [0, size)."""
    if min(values) < 0 or max(values) >= size:
        raise IndexError(f"a {what} is outside the {size} {of_what}")


def _quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, inputs] -> integers in float32 [outputs, inputs], scales [outputs]."""
    # An output whose weights are all 0 keeps them: any scale will do.
    scale = (weight.abs().amax(dim=1) / _LARGEST_INT8).clamp_(min=torch.finfo(torch.float32).tiny)
    return torch.round(weight / scale[:, None]), scale


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
        self._cache = cache
        self._panel: int = library.specdec_panel()
        self._group: int = library.specdec_group()
        self._max_queries: int = library.specdec_max_queries()
        self._kept: list[torch.Tensor] = []  # what the structures point to
        self._num_embeddings = cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0]
        self._is_compact = is_compact
        self._model = self._describe_model(model, kinds, is_int8)
        self._heads = heads
        self._tapped = tuple(sorted({layer for head in heads.values() for layer in head.feature_layers}))
        self._drafts = {name: self._describe_exit(early_exit, model.lm_head) for name, early_exit in exits.items()}
        self._model.num_tapped = len(self._tapped)
        self._model.tapped = self._keep(torch.tensor(self._tapped, dtype=torch.int64))
        self._batch = Batch()
        self._numbers = np.empty(0, dtype=np.int64)
        """What `_batch` points into, as it does into the next."""
        self._scratch = torch.empty(0)
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
        return bool(fits) and widest <= _MOST_INT8_INPUTS and model.config.hidden_act in ("silu", "swish")

    @staticmethod
    def round_weight(weight: torch.Tensor) -> torch.Tensor:
        """What a weight [out, in] is multiplied as, where weights are int8."""
        integers, scale = _quantise(weight)
        return integers.mul_(scale[:, None])

    @property
    def weight_bytes(self) -> int:
        """What is read of memory for the weights, all of them: embeddings and tables of positions included."""
        return sum(tensor.nbytes for tensor in self._kept)

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Runs one step; see `engine.base.Worker.execute`."""
        slices, batch = plan.slices, self._batch
        if plan.local_draft in self._heads:
            self._check(slices)
            with torch.inference_mode():
                return self._heads[plan.local_draft].draft(plan).to(torch.float32, copy=True)
        model = self._drafts[plan.local_draft] if plan.local_draft else self._model
        self._check(slices)
        self._numbers = self._place_numbers(slices)
        num_threads = torch.get_num_threads()
        longest = max(piece.start + len(piece.token_ids) for piece in slices)
        self._place_scratch(batch.tokens, longest, num_threads)
        logits = torch.empty(batch.logit_rows, self._padded(model.head.outputs))
        batch.logits = logits.data_ptr()
        outputs = None
        if model.num_tapped:
            outputs = torch.empty(model.num_tapped, batch.tokens, model.hidden)
            batch.outputs = outputs.data_ptr()
        if plan.block_copies:
            self._cache.copy_blocks(plan.block_copies)
        self._library.specdec_step(ctypes.byref(model), ctypes.byref(batch), num_threads)
        if outputs is not None:
            self._tell_heads(plan, outputs)
        return logits[:, : self.shape.vocabulary_size].contiguous()

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

    def _place_numbers(self, slices: Sequence[SequenceSlice]) -> NDArray[np.int64]:
        """Points the batch at a plan's numbers; returns what holds them.

        They lie in one array: a draft step is so short that making six would show.
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
        numbers = np.array([*chain.from_iterable(columns.values())], dtype=np.int64)
        batch, address = self._batch, numbers.ctypes.data
        for name, column in columns.items():
            setattr(batch, name, address)
            address += len(column) * numbers.itemsize
        batch.tokens, batch.sequences, batch.logit_rows = first_rows[-1], len(slices), len(columns["rows_wanted"])
        return numbers

    def _check(self, slices: Sequence[SequenceSlice]) -> None:
        """Raises IndexError where a slice reaches beyond what it names: the kernels would read and write there."""
        for piece in slices:
            count = len(piece.token_ids)
            end = piece.start + count
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
        model, batch = self._model, self._batch
        heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
        widest = -(-max(model.hidden, heads * head_dim, model.mlp) // self._group) * self._group
        sizes = {
            "hidden": tokens * model.hidden,
            "normed": tokens * model.hidden,
            "qkv": tokens * self._padded((heads + 2 * kv_heads) * head_dim),
            "attended": tokens * heads * head_dim,
            "gate_up": tokens * self._padded(2 * model.mlp),
            "row_scales": tokens,
            "scores": num_threads * self._max_queries * scores_width,
            "high": tokens * widest // self._scratch.itemsize,  # bytes, in whole groups of as many
            "low": tokens * widest // self._scratch.itemsize,
        }
        total = sum(sizes.values())
        if self._scratch.numel() < total:
            self._scratch = torch.empty(total)
        batch.scores_width = scores_width
        address = self._scratch.data_ptr()
        for name, size in sizes.items():
            setattr(batch, name, address)
            address += size * self._scratch.itemsize
        self._placed = tokens, scores_width, num_threads

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
        embeddings = inner.embed_tokens.weight.detach()
        if self._is_compact:
            embeddings = halved(embeddings)
        self._layers = layers
        return Model(
            layers=layers,
            num_layers=len(layers),
            hidden=first.q_proj.in_features,
            heads=first.q_proj.out_features // first.head_dim,
            kv_heads=first.k_proj.out_features // first.head_dim,
            head_dim=first.head_dim,
            mlp=model.config.intermediate_size,
            embeddings=self._keep(embeddings),
            embedding_format=FORMAT_OF[embeddings.dtype],
            cosines=self._keep(cosines[0]),
            sines=self._keep(sines[0]),
            final_gains=self._keep(inner.norm.weight),
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
            qk_gains = self._keep(torch.cat((q.expand(heads, -1), k.expand(kv_heads, -1))))
        return Layer(
            qkv=self._describe_product([attention.q_proj, attention.k_proj, attention.v_proj], is_int8),
            output=self._describe_product([attention.o_proj], is_int8),
            gate_up=self._describe_product([mlp.gate_proj, mlp.up_proj], is_int8),
            down=self._describe_product([mlp.down_proj], is_int8),
            attention_gains=self._keep(layer.input_layernorm.weight),
            mlp_gains=self._keep(layer.post_attention_layernorm.weight),
            qk_gains=qk_gains,
            cache=self._cache.layers[index].rows.data_ptr(),
            window=kind.window or 0,
        )

    def _describe_product(self, linears: list[nn.Linear], is_int8: bool) -> Product:
        """One product whose outputs are those of several layers that share their input, side by side."""
        weight = torch.cat([linear.weight.detach() for linear in linears])  # [outputs, inputs]
        outputs, inputs = weight.shape
        scales = offsets = bias = None
        format_ = Format.INT8
        if linears[0].bias is not None:
            bias = self._keep(self._pad(torch.cat([linear.bias.detach() for linear in linears])))
        if is_int8:
            integers, scale = _quantise(weight)
            rounded = self._pad(nn.functional.pad(integers, (0, -inputs % self._group)))
            scales = self._keep(self._pad(scale))
            offsets = self._keep((rounded.sum(dim=1, dtype=torch.float64) * _ZERO_BYTE).to(torch.int32))
            groups = rounded.to(torch.int8).view(-1, self._panel, rounded.shape[1] // self._group, self._group)
            packed = groups.transpose(1, 2)
        else:
            format_, packed = (pack_shortest if self._is_compact else pack)(self._pad(weight), self._panel)
        return Product(
            weights=self._keep(packed), format=format_, scales=scales, offsets=offsets, bias=bias,
            inputs=inputs, outputs=outputs,
        )  # fmt: skip

    def _pad(self, rows: torch.Tensor) -> torch.Tensor:
        """[outputs, ...] -> [whole panels of outputs, ...], zeros appended."""
        padding = self._padded(len(rows)) - len(rows)
        return torch.cat((rows, rows.new_zeros(padding, *rows.shape[1:]))) if padding else rows

    def _padded(self, outputs: int) -> int:
        return -(-outputs // self._panel) * self._panel

    def _keep(self, tensor: torch.Tensor) -> int:
        """The address of a contiguous copy that lives as long as this runner."""
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()
