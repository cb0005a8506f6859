"""Small steps of one sequence through a backend of `torch.compile` (`--compile-backend NAME`).

A draft step and a verification of one session are a few rows that read the cache. Here they run through a compiled
function that calls the eager stack (`engine.model.llama_stack`) with an attention that compilers can trace. It is
compiled before the service is ready, once for one row and once for more. Prefill chunks and steps of several sequences
stay eager. Called by `engine.loader`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from specdec.contract.errors import Unsupported
from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.model.attention import PagedContext
from specdec.engine.model.batch import AttentionKind, KvView, StepBatch
from specdec.engine.model.kv_cache import KvCache
from specdec.engine.model.llama_stack import LlamaStack
from specdec.engine.model.model_runner import ForwardPass, GraphSource
from specdec.engine.model.start_progress import shown
from specdec.engine.options import CompileOptions, first_line

_log = logging.getLogger(__name__)

# A verification has at most this many rows; from 24 on, int8 products take another path.
_MOST_ROWS = 17
# Compilers treat a dimension of 1 as a shape of its own.
_FEWEST_BLOCKS = 2
_MOST_BLOCKS = 1 << 16
_TYPICAL_BLOCKS = 16
# Versions of one function in a process, those of other models included. PyTorch's own limit exists to find loops.
_MOST_VERSIONS = 100


def compile_steps(options: CompileOptions, source: GraphSource, forward: ForwardPass) -> ForwardPass:
    """Return `forward` with its small steps compiled by `options.backend`.

    Raises:
        Unsupported: the backend cannot compile this model on this machine.
    """
    if not isinstance(forward, LlamaStack):
        kind = source.model.config.model_type
        _log.warning("compile_backend %s compiles no model of type %s: it runs eagerly", options.backend, kind)
        return forward
    try:
        return CompiledSteps(options, source, forward)
    except Exception as error:  # a backend raises what it likes
        problem = f"compile_backend {options.backend!r} cannot compile this model here: {first_line(error)}"
        raise Unsupported(problem, field="compile_backend") from error


class CompiledSteps:
    """`engine.model.model_runner.ForwardPass` that compiles the small steps of another one."""

    def __init__(self, options: CompileOptions, source: GraphSource, eager: LlamaStack) -> None:
        self._eager, self._cache = eager, source.cache
        self._kinds = tuple(dict.fromkeys(source.layer_kinds))
        self._kind_of_layer = tuple(self._kinds.index(kind) for kind in source.layer_kinds)
        self._most_rows = min(max(options.row_counts, default=0), _MOST_ROWS)
        self._compiled = torch.compile(self._run, backend=options.backend, fullgraph=True)
        # A step runs in inference mode, and a function compiled outside it would be compiled again.
        with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=_MOST_VERSIONS):
            for num_rows in shown(range(1, min(self._most_rows, 2) + 1), "compiling steps", "{} rows".format):
                self._compiled(*self._example(num_rows))
        for layer in self._cache.layers:
            layer.blocks[0].zero_()  # the examples wrote there

    def __call__(self, batch: StepBatch, context: PagedContext) -> torch.Tensor:
        group = batch.groups[0]
        views = [view for view in group.views if view is not None]
        is_compiled = group.batch == 1 and group.num_rows <= self._most_rows and len(views) == len(self._kinds)
        if len(batch.groups) > 1 or not is_compiled:
            return self._eager(batch, context)
        if batch.opened_blocks is not None:
            for layer in self._cache.layers:
                layer.clear(batch.opened_blocks)
        block_ids = [_blocks_read(view, batch.slots.device) for view in views]
        logits = self._compiled(batch.token_ids, batch.position_ids, batch.slots, block_ids)
        return logits.index_select(0, batch.logit_rows)

    def _run(
        self,
        token_ids: torch.Tensor,  # int64 [1, Q]
        position_ids: torch.Tensor,  # int64 [1, Q]
        slots: torch.Tensor,  # int64 [Q]
        block_ids: list[torch.Tensor],  # int64 [n] for each attention kind
    ) -> torch.Tensor:
        """Return the logits [Q, V] of every row."""
        rows = torch.arange(slots.shape[0], device=slots.device)
        batch = StepBatch(token_ids, position_ids, slots, None, rows, ())
        masks = [
            _mask(kind, position_ids[0], ids.shape[0], self._cache.layers[0].blocks.dtype)
            for kind, ids in zip(self._kinds, block_ids, strict=True)
        ]
        return self._eager(batch, _TracedContext(self._cache, self._kind_of_layer, slots, block_ids, masks))

    def _example(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Return arguments of `_run`; those of two rows stand for any number of rows from there on."""
        positions = torch.arange(num_rows, device=self._cache.layers[0].blocks.device)
        token_ids, position_ids, slots = torch.zeros_like(positions)[None], positions[None].clone(), positions.clone()
        block_ids = [slots.new_zeros(_TYPICAL_BLOCKS) for _ in self._kinds]
        for ids in block_ids:
            torch._dynamo.mark_dynamic(ids, 0, min=_FEWEST_BLOCKS, max=_MOST_BLOCKS)
        for tensor in (token_ids, position_ids, slots) if num_rows > 1 else ():
            torch._dynamo.mark_dynamic(tensor, tensor.dim() - 1, min=2, max=_MOST_ROWS)
        return token_ids, position_ids, slots, block_ids


@dataclass(frozen=True, slots=True)
class _TracedContext:
    """`engine.model.attention.RowContext` of one sequence in operations that compilers trace."""

    cache: KvCache
    kind_of_layer: tuple[int, ...]
    slots: torch.Tensor
    block_ids: Sequence[torch.Tensor]
    masks: Sequence[torch.Tensor]

    def attend_rows(
        self, layer_index: int, query: torch.Tensor, kv_rows: torch.Tensor, scale: float, softcap: float | None
    ) -> torch.Tensor:
        layer, kind = self.cache.layers[layer_index], self.kind_of_layer[layer_index]
        layer.write(self.slots, kv_rows)
        (num_rows, _, dim), kv_heads = query.shape, layer.shape.num_kv_heads
        # Through `rows` as the write is: two views of one pool would be two inputs that share memory.
        blocks = layer.rows.view(-1, BLOCK_TOKENS * layer.shape.row_width).index_select(0, self.block_ids[kind])
        both = blocks.view(-1, 2, kv_heads, dim).permute(1, 2, 0, 3)  # [2, KV, L, D]
        packed = query.reshape(num_rows, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
        output = scaled_dot_product_attention(packed, both[:1], both[1:], attn_mask=self.masks[kind], scale=scale)
        return output.view(kv_heads, num_rows, -1, dim).transpose(0, 1).reshape(num_rows, -1, dim)


def _mask(kind: AttentionKind, positions: torch.Tensor, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask [Q * queries_per_kv_head, L] over the last blocks of a sequence."""
    first = (positions[-1] // BLOCK_TOKENS - (num_blocks - 1)) * BLOCK_TOKENS
    keys = first + torch.arange(num_blocks * BLOCK_TOKENS, device=positions.device)
    queries = positions.repeat_interleave(kind.queries_per_kv_head)[:, None]
    visible = (keys >= 0) & (keys <= queries)  # a block in front of the first position repeats another one
    if kind.window is not None:
        visible = visible & (keys > queries - kind.window)
    return torch.where(visible, 0.0, float("-inf")).to(dtype)


def _blocks_read(view: KvView, device: torch.device) -> torch.Tensor:
    """Return int64 [n]: the blocks that a view reads, at least `_FEWEST_BLOCKS` of them."""
    ids = view.block_ids
    if ids is None:
        first, num_blocks = view.run_start // BLOCK_TOKENS, -(-view.length // BLOCK_TOKENS)
        ids = torch.arange(first, first + num_blocks, device=device)
    return ids if len(ids) >= _FEWEST_BLOCKS else ids.repeat(_FEWEST_BLOCKS)
