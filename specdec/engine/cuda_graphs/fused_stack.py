"""The forward pass of a Llama-shaped model in ten kernels a layer: one kernel between two matrix products.

It applies the same weights in the same order as `engine.model.llama_stack`, which remains the definition and runs
wherever these kernels do not. Sums and norms are rounded where the modules of transformers round. The rotary kernel
(`engine.cuda_graphs.fused_operations`) stores keys and values in the cache, so the attention
(`engine.cuda_graphs.paged_attention`) finds them there. Called by `engine.cuda_graphs.graph_steps`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import nn
from transformers.activations import ACT2FN

from specdec.engine.base import SequenceSlice
from specdec.engine.cuda_graphs import fused_operations as fused
from specdec.engine.cuda_graphs.buckets import Bucket
from specdec.engine.cuda_graphs.fused_operations import Norm
from specdec.engine.cuda_graphs.paged_attention import PagedAttention
from specdec.engine.cuda_graphs.static_inputs import StaticInputs, StepNumbers, input_size
from specdec.engine.model.attention import RowContext
from specdec.engine.model.batch import StepBatch
from specdec.engine.model.early_exit import EarlyExit
from specdec.engine.model.kv_cache import KvCache
from specdec.engine.model.llama_stack import LlamaStack, RowForward, StackLayer, StackNorm
from specdec.engine.options import Agreement, Capture, first_line

_log = logging.getLogger(__name__)

# The classes of the "silu" and "swish" activations in different versions of transformers.
_SILU = (nn.SiLU, type(ACT2FN["silu"]))
_TRIAL_BUCKET = Bucket(num_sequences=1, width=3, num_blocks=1)
_TRIAL_SLICE = SequenceSlice((0, 0, 0), 0, (0,), 3)
# Limit of the relative error. A wrong sign, head or column gives tenths; rounding to 16 bits gives a hundredth.
_TRIAL_TOLERANCE = 0.05


class StoredContext(RowContext, Protocol):
    """Attention over keys and values that are in the cache already."""

    def attend(self, layer_index: int, query: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
        """Return the outputs [T, H, value_dim] of `query` [T, H, key_dim]."""
        ...


class FusedStack:
    """The forward pass of a `LlamaStack` over a cache, with fused kernels."""

    def __init__(self, stack: LlamaStack, cache: KvCache) -> None:
        self._stack = stack
        self._layers = [FusedLayer(layer, index, cache) for index, layer in enumerate(stack.layers)]
        self._norm = _norm_of(stack.norm)

    def __call__(self, batch: StepBatch, context: RowContext) -> torch.Tensor:
        """Return the logits [R, rows of the output head] of `batch.logit_rows`; `context` is a `StoredContext`."""
        logits: torch.Tensor = self._stack.head(self._run(batch, context, len(self._layers)))
        return logits

    def with_outputs(
        self, batch: StepBatch, context: RowContext, layers: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """See `engine.model.model_runner.TappedPass`."""
        outputs: dict[int, torch.Tensor] = dict.fromkeys(layers, torch.empty(0))
        logits: torch.Tensor = self._stack.head(self._run(batch, context, len(self._layers), outputs))
        return logits, list(outputs.values())

    def early_exit(self, early_exit: EarlyExit) -> RowForward:
        """See `engine.model.llama_stack.RowPass`."""
        adapter = early_exit.adapter or (lambda normed: normed)

        def forward(batch: StepBatch, context: RowContext) -> torch.Tensor:
            logits: torch.Tensor = self._stack.head(adapter(self._run(batch, context, early_exit.num_layers)))
            return logits

        return forward

    def _run(
        self,
        batch: StepBatch,
        context: RowContext,
        num_layers: int,
        outputs: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the first layers' normalised output [R, hidden] for `batch.logit_rows`; see `LlamaStack._run`."""
        stored = cast(StoredContext, context)
        residual = self._stack.embed(batch.token_ids[0])  # [T, hidden]
        delta = None
        cos, sin = self._stack.rotary(residual, batch.position_ids)  # [1, T, head_dim]
        for index, layer in enumerate(self._layers[:num_layers]):
            delta = layer.run(residual, delta, cos[0], sin[0], batch.slots, stored)
            if outputs is not None and index in outputs:
                outputs[index] = residual + delta
        return fused.normalise(residual, delta, self._norm, batch.logit_rows)


class FusedLayer:
    """One decoder layer: two norms, four matrix products, two attention kernels, rotary embedding and gate."""

    def __init__(self, layer: StackLayer, index: int, cache: KvCache) -> None:
        self._layer = layer
        self._index = index
        self._kv = cache.layers[index]
        self._attention_norm, self._mlp_norm = _norm_of(layer.attention_norm), _norm_of(layer.mlp_norm)
        self._qk_norm = None if layer.qk_norm is None else _norm_of(layer.qk_norm)
        self._has_silu = isinstance(layer.activation, _SILU)

    def run(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        context: StoredContext,
    ) -> torch.Tensor:
        """Return the change [T, hidden] that the layer makes to `residual`.

        `delta`, the change made by the layer before, is added to `residual` in place first.
        """
        layer = self._layer
        qkv = layer.qkv.forward(fused.normalise(residual, delta, self._attention_norm))
        query = fused.rotate(qkv, cos, sin, self._qk_norm, slots, self._kv)
        attended = context.attend(self._index, query, layer.scaling, None)
        delta = layer.output.forward(attended.flatten(1))
        gate_up = layer.gate_up.forward(fused.normalise(residual, delta, self._mlp_norm))
        if self._has_silu:
            gated = fused.gated(gate_up)
        else:
            gate, up = gate_up.chunk(2, dim=1)
            gated = layer.activation(gate) * up
        return layer.down.forward(gated)


def _norm_of(norm: StackNorm) -> Norm:
    return Norm(norm.gains.contiguous(), norm.eps)


def fuse_stack(
    stack: LlamaStack,
    cache: KvCache,
    attention: PagedAttention,
    capture: Capture,
    all_agree: Agreement | None = None,
) -> FusedStack | None:
    """Return the pass with fused kernels, or None after a warning if a trial of its first layer fails on this device.

    Args:
        stack: the eager pass.
        cache: the KV pool, none of whose blocks are in use yet.
        attention: the attention over `cache`.
        capture: records a step.
        all_agree: see `engine.cuda_graphs.graph_steps.capture_steps`.

    Raises:
        Exception: the trial raised it while other ranks wait in the same step.
    """
    try:
        with torch.inference_mode():
            error = _relative_error(stack, cache, attention, capture)
        problem = None
        if error > _TRIAL_TOLERANCE:
            problem = f"fused kernels differ from the eager layer by {error:.2g}, limit {_TRIAL_TOLERANCE}"
    except Exception as failure:  # raised by the compiler, a driver or the allocator
        if all_agree is not None:  # other ranks wait in the middle of the trial step
            raise
        problem = f"fused kernels failed their trial: {first_line(failure)}"
    if all_agree is not None and not all_agree(problem is None):
        problem = problem or "fused kernels failed their trial on another rank"
    if problem is None:
        return FusedStack(stack, cache)
    _log.warning("%s; using one kernel per operation", problem)
    return None


def _relative_error(stack: LlamaStack, cache: KvCache, attention: PagedAttention, capture: Capture) -> float:
    """Return the difference of the two passes after the first layer, relative to the change that the layer makes."""
    pool = cache.layers[0].blocks
    numbers_of_step = StepNumbers(input_size(_TRIAL_BUCKET, keeps_tables=True), pool.device)
    inputs = StaticInputs(_TRIAL_BUCKET, numbers_of_step, cache.num_blocks - 1, attention.tables)
    inputs.fill((_TRIAL_SLICE,))
    like = stack.embed(inputs.on_device.token_ids[0])
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(3, like.shape[1], generator=generator).to(like)
    plain, fused_output = torch.zeros_like(numbers), torch.zeros_like(numbers)
    layer = FusedLayer(stack.layers[0], 0, cache)

    def step() -> None:
        batch, context = attention.lay_out(inputs)
        cos, sin = stack.rotary(numbers, batch.position_ids)
        residual = numbers.clone()
        delta = layer.run(residual, None, cos[0], sin[0], batch.slots, cast(StoredContext, context))
        fused_output.copy_(residual + delta)

    capture(step)()
    batch, context = attention.lay_out(inputs)
    plain.copy_(stack.run_layer(0, numbers, batch, context))
    cache.layers[0].clear(torch.zeros(1, dtype=torch.int64, device=pool.device))
    added = (plain - numbers).to(torch.float64)
    error = float((fused_output - plain).to(torch.float64).norm() / added.norm())
    return float("inf") if math.isnan(error) else error
