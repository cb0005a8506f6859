"""The worker: carries out step plans on one model and its paged KV cache.

A step's tokens go from here through the model and its attention (`specdec.engine.model.attention`); their logits go
back to `specdec.engine.loop.steps`. Not here: loading (`specdec.engine.loader`), scheduling, sampling. Called by the
device thread, one step at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.engine.base import ModelShape, SequenceSlice, StepPlan, Worker
from specdec.engine.model.attention import PagedContext, attending
from specdec.engine.model.batch import AttentionKind, StepBatch, build_batch
from specdec.engine.model.kv_cache import KvCache


class ForwardPass(Protocol):
    """A model's weights as one function."""

    def __call__(self, batch: StepBatch, context: PagedContext) -> torch.Tensor:
        """Logits [R, rows of the model's head] of `batch.logit_rows`, in the model's dtype."""
        ...


class RecordedSteps(Protocol):
    """Steps that need not be laid out to be run."""

    def run(self, slices: Sequence[SequenceSlice]) -> torch.Tensor | None:
        """[R, vocabulary_size] logits in the model's dtype, valid until the next step; None: not one of those."""
        ...


class TransformersForward:
    """Any causal language model of transformers, through its own forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def __call__(self, batch: StepBatch, context: PagedContext) -> torch.Tensor:
        with attending(context):
            output = self._model(
                input_ids=batch.token_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.logit_rows,
            )
        logits: torch.Tensor = output.logits[0]  # [R, V]
        return logits


class ModelRunner(Worker):
    """Implements `engine.base.Worker`. Not thread-safe: one step at a time."""

    def __init__(
        self,
        forward: ForwardPass,
        cache: KvCache,
        layer_kinds: Sequence[AttentionKind],
        shape: ModelShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        recorded: RecordedSteps | None = None,
    ) -> None:
        """`recorded`: asked first; what it does not take goes to `forward`."""
        self.shape = shape
        self._recorded = recorded
        self._forward = forward
        self._cache = cache
        self._kinds = tuple(dict.fromkeys(layer_kinds))
        self._kind_of_layer = tuple(self._kinds.index(kind) for kind in layer_kinds)
        self._dtype = dtype
        self._device = device

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Runs one step; see `engine.base.Worker.execute`."""
        with torch.inference_mode():
            if plan.block_copies:
                self._cache.copy_blocks(plan.block_copies)
            logits = None if self._recorded is None else self._recorded.run(plan.slices)
            if logits is None:
                batch = build_batch(plan, self._kinds, dtype=self._dtype, device=self._device)
                context = PagedContext(batch, self._cache, self._kind_of_layer)
                logits = self._forward(batch, context)[:, : self.shape.vocabulary_size]
        if logits.is_cuda and not len(logits):
            # Nothing of the step will be read back: unless waited for, it would be timed, and delay calls, with the
            # next one.
            torch.cuda.synchronize(logits.device)
        # Copied outside inference mode: callers may write into what they get.
        return logits.to(torch.float32, copy=True)

    def read_blocks(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """Copies KV blocks out; see `engine.base.Worker.read_blocks`."""
        return self._cache.copies.read(block_ids)

    def write_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Copies KV blocks in; see `engine.base.Worker.write_blocks`."""
        self._cache.copies.write(block_ids, rows)
