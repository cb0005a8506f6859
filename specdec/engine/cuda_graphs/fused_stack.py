"""The eager pass of a Llama-shaped model in fewer kernels: ten a layer, whatever lies between products being one each.

The same weights, in the same order, as `engine.model.llama_stack`, which stays the definition and runs wherever these
kernels do not. Sums and norms are rounded where transformers' modules round. Keys and values go straight into the
cache, so the attention that this takes finds them stored. Not here: the kernels
(`engine.cuda_graphs.fused_operations`), who sees whom (`engine.cuda_graphs.paged_attention`). Called by
`engine.cuda_graphs.steps`.
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

# What configurations call "silu" or "swish", by the version of transformers.
_SILU = (nn.SiLU, type(ACT2FN["silu"]))
_TRIAL_BUCKET = Bucket(num_sequences=1, width=3, num_blocks=1)
_TRIAL_SLICE = SequenceSlice((0, 0, 0), 0, (0,), 3)
# Of the length of a layer's output: a wrong sign, head or column is off by tenths, rounding to 16 bits by a hundredth.
_TRIAL_TOLERANCE = 0.05


class StoredContext(RowContext, Protocol):
    """An attention that finds keys and values stored."""

    def attend(self, layer_index: int, query: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
        """[T, H, value_dim] of query [T, H, key_dim]."""
        ...


class FusedStack:
    """A `LlamaStack`'s pass over a cache."""

    def __init__(self, stack: LlamaStack, cache: KvCache) -> None:
        self._stack = stack
        self._layers = [FusedLayer(layer, index, cache) for index, layer in enumerate(stack.layers)]
        self._norm = _norm_of(stack.norm)

    def __call__(self, batch: StepBatch, context: RowContext) -> torch.Tensor:
        """Logits [R, rows of the model's head] of `batch.logit_rows`; `context` is a `StoredContext`."""
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
        """What the first layers make of the rows that are wanted, normalised: [R, hidden]; see `LlamaStack._run`."""
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
    """One decoder layer: two norms, four products, two kernels of attention, rotation, gate."""

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
        """What the layer adds to `residual` [T, hidden], which is given what the layer before adds to it."""
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
    """The pass in fewer kernels, where a trial of its first layer shows that they are right on this device.

    Args:
        stack: the eager pass.
        cache: the pool, of which nothing is in use yet.
        attention: over it.
        capture: records steps.
        all_agree: see `engine.cuda_graphs.steps.capture_steps`.

    Returns:
        None, after one warning, where they are not.

    Raises:
        Exception: they failed, and others wait for them.
    """
    try:
        with torch.inference_mode():
            error = _relative_error(stack, cache, attention, capture)
        problem = None
        if error > _TRIAL_TOLERANCE:
            problem = f"fused kernels differ from the eager layer by {error:.2g}, limit {_TRIAL_TOLERANCE}"
    except Exception as failure:  # the compiler, a driver or the device's memory
        if all_agree is not None:  # the others are in the middle of a step, and wait
            raise
        problem = f"fused kernels failed their trial: {first_line(failure)}"
    if all_agree is not None and not all_agree(problem is None):
        problem = problem or "fused kernels failed their trial on another rank"
    if problem is None:
        return FusedStack(stack, cache)
    _log.warning("%s; using one kernel per operation", problem)
    return None


def _relative_error(stack: LlamaStack, cache: KvCache, attention: PagedAttention, capture: Capture) -> float:
    """The difference of both ways through the first layer, over the length of what that adds to its input."""
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
