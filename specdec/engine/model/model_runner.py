"""Worker that runs step plans on one model and its paged KV cache.

A step's tokens go from here through the model and its attention (`specdec.engine.model.attention`); their logits go
back to `specdec.engine.loop.steps`. Built by `engine.load_pipeline`, called by the device thread, one step at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from specdec.engine.base import ModelShape, MultiStepDrafts, SequenceSlice, StepPlan, Worker
from specdec.engine.model.attention import PagedContext, attending
from specdec.engine.model.batch import AttentionKind, StepBatch, build_batch
from specdec.engine.model.feature_layer import FeatureLayer
from specdec.engine.model.kv_cache import KvCache, LayerKv
from specdec.engine.model.past_lengths import counting_from, follow_positions
from specdec.engine.model.recurrence import recurring_in


@dataclass(frozen=True, slots=True)
class GraphSource:
    """A loaded model with its layers' attention kinds and its KV cache, from which a forward pass is made."""

    model: PreTrainedModel
    layer_kinds: Sequence[AttentionKind]
    cache: KvCache


class ForwardPass(Protocol):
    """A model's weights as one function."""

    def __call__(self, batch: StepBatch, context: PagedContext) -> torch.Tensor:
        """Return the logits [R, rows of the model's head] of `batch.logit_rows`, in the model's dtype."""
        ...


class TappedPass(ForwardPass, Protocol):
    """A forward pass that also returns its layers' outputs."""

    def with_outputs(
        self, batch: StepBatch, context: PagedContext, layers: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the logits and the outputs [T, H] of `layers` (indices in ascending order), rows as in the batch."""
        ...


class LocalHead(Protocol):
    """Draft head that reads the outputs of a model's layers and keeps its state in the model's cache."""

    feature_layers: tuple[int, ...]
    """Indices of the layers whose outputs the head reads."""
    cached: Sequence[LayerKv]
    """Pools of the head's features and then of the KV of each of its layers."""

    @property
    def layer(self) -> FeatureLayer | None:
        """The head's weights if it is one decoder layer, so that a worker may compute it itself; else None."""
        ...

    def note_step(self, plan: StepPlan, hidden: Sequence[torch.Tensor], slots: torch.Tensor | None = None) -> None:
        """Keep the features of a full step that was run.

        Args:
            plan: plan of the step.
            hidden: outputs [T, H] of `feature_layers`.
            slots: int64 [T], KV slot of each row; None if the rows are in the order of the plan.
        """
        ...

    def draft(self, plan: StepPlan) -> torch.Tensor:
        """Run a draft step; return the logits [B, V] in the order of the plan."""
        ...


class LayerOutputs(NamedTuple):
    """Outputs of layers in a step of T rows, which may include padding rows."""

    hidden: Sequence[torch.Tensor]
    """[T, H] of each layer, valid until the next step."""
    slots: torch.Tensor
    """int64 [T]: KV slot of each row. Padding rows point to the scratch block."""


class RecordedSteps(Protocol):
    """Recorded steps of a worker: CUDA graphs, or recordings of a test."""

    outputs: LayerOutputs
    """Outputs of the tapped layers in the newest step."""

    def run(self, slices: Sequence[SequenceSlice]) -> torch.Tensor | None:
        """Run a step; return None if no recording fits it.

        Returns:
            Logits [R, at least vocabulary_size] in the head's dtype, valid until the next step.
        """
        ...

    @property
    def supports_multi_step(self) -> bool:
        """True if `fits_multi_step` can be true."""
        ...

    def fits_multi_step(self, slices: Sequence[SequenceSlice]) -> bool:
        """Return whether `multi_step` works after a step of these slices."""
        ...

    def multi_step(self, slices: Sequence[SequenceSlice]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that runs the next step of the newest step's sequences: tokens, int64 [B], to logits."""
        ...


#: Key of full steps among recorded steps.
FULL = ""


def tapped_layers(heads: Mapping[str, LocalHead]) -> tuple[int, ...]:
    """Return the indices of the layers whose outputs the heads need, in ascending order."""
    return tuple(sorted({layer for head in heads.values() for layer in head.feature_layers}))


class TransformersForward:
    """Forward pass of any causal language model of transformers, by its own modules."""

    def __init__(self, model: torch.nn.Module, layers: Sequence[torch.nn.Module] = ()) -> None:
        """`layers`: the model's decoder layers, needed for `with_outputs`."""
        self._model = model
        self._layers = layers
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        follow_positions(model)

    def with_outputs(
        self, batch: StepBatch, context: PagedContext, layers: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """See `TappedPass`."""
        outputs: list[torch.Tensor] = []

        def note(_module: torch.nn.Module, _inputs: object, output: object) -> None:
            outputs.append((output[0] if isinstance(output, tuple) else cast(torch.Tensor, output))[0])

        with ExitStack() as ending:
            for layer in layers:
                ending.callback(self._layers[layer].register_forward_hook(note).remove)
            return self(batch, context), outputs

    def __call__(self, batch: StepBatch, context: PagedContext) -> torch.Tensor:
        with attending(context), counting_from(batch.position_ids), recurring_in(batch, context.cache.states):
            output = self._model(
                input_ids=batch.token_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.logit_rows,
            )
        logits: torch.Tensor = output.logits[0]  # [R, V], or of all rows
        return logits if self._keeps_rows else logits.index_select(0, batch.logit_rows)


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
        recorded: Mapping[str, RecordedSteps] = MappingProxyType({}),
        drafts: Mapping[str, ForwardPass] = MappingProxyType({}),
        heads: Mapping[str, LocalHead] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            forward: forward pass of full steps; a `TappedPass` if there are heads.
            cache: KV pool.
            layer_kinds: attention kind of each layer.
            shape: description of the worker.
            dtype: dtype of the model.
            device: device of the model.
            recorded: recorded full steps (`FULL`) and draft steps, by the name of the local draft. Steps that no
                recording fits go to `forward` and `drafts`.
            drafts: forward passes of draft steps, by the name of the local draft.
            heads: draft heads, by the name of the local draft.
        """
        self.shape = shape
        self._drafts = drafts
        self._heads = heads
        self._tapped = tapped_layers(heads)
        self._recorded = recorded
        if FULL in recorded and recorded[FULL].supports_multi_step:
            self.multi_step_drafts = MultiStepDrafts.ANY
        self._forward = forward
        self._cache = cache
        self._kinds = tuple(dict.fromkeys(layer_kinds))
        self._kind_of_layer = tuple(self._kinds.index(kind) for kind in layer_kinds)
        self._dtype = dtype
        self._device = device

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Run one step; see `engine.base.Worker.execute`."""
        with torch.inference_mode():
            if plan.block_copies:
                self._cache.copy_blocks(plan.block_copies)
            logits = self._run(plan)[:, : self.shape.vocabulary_size]
        if logits.is_cuda and not len(logits):
            # Nothing of the step will be read back. Without this wait its time would be counted with the next step's.
            torch.cuda.synchronize(logits.device)
        # Copied outside inference mode, so that callers may write to the logits.
        return logits.to(torch.float32, copy=True)

    def draft(self, plan: StepPlan, num_steps: int, draw: Callable[[int, torch.Tensor], torch.Tensor]) -> bool:
        """Run a step and the steps that follow it; see `engine.base.Worker.draft`."""
        recorded = self._recorded.get(FULL)
        if recorded is None or plan.local_draft or plan.block_copies or not recorded.fits_multi_step(plan.slices):
            return False
        with torch.inference_mode():
            logits, run_next = self._run(plan), recorded.multi_step(plan.slices)
            for index in range(num_steps):
                rows = logits[:, : self.shape.vocabulary_size].to(torch.float32)
                token_ids = draw(index, rows)
                if index + 1 < num_steps:
                    logits = run_next(token_ids)
        return True

    def _run(self, plan: StepPlan) -> torch.Tensor:
        """Return the logits [R, at least vocabulary_size] in the model's dtype."""
        if plan.local_draft in self._heads:
            return self._heads[plan.local_draft].draft(plan)
        recorded = self._recorded.get(plan.local_draft)
        if recorded is not None:
            logits = recorded.run(plan.slices)
            if logits is not None:
                if not plan.local_draft:
                    self._note(plan, recorded.outputs)
                return logits
        if self._cache.states is not None and any(part.start and part.states is None for part in plan.slices):
            raise ValueError("a slice that does not begin its sequence has no state to begin with")
        batch = build_batch(plan, self._kinds, dtype=self._dtype, device=self._device)
        context = PagedContext(batch, self._cache, self._kind_of_layer)
        if plan.local_draft:
            return self._drafts[plan.local_draft](batch, context)
        if not self._heads:
            return self._forward(batch, context)
        logits, outputs = cast(TappedPass, self._forward).with_outputs(batch, context, self._tapped)
        self._note(plan, LayerOutputs(outputs, batch.slots))
        return logits

    def _note(self, plan: StepPlan, outputs: LayerOutputs) -> None:
        """Hand the layers' outputs of a full step to the heads."""
        for head in self._heads.values():
            own = [outputs.hidden[self._tapped.index(layer)] for layer in head.feature_layers]
            head.note_step(plan, own, outputs.slots)

    def close(self) -> None:
        """Release the recordings: a group of ranks cannot end while recordings hold its sums."""
        self._recorded = {}

    def read_blocks(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """Copy KV blocks out; see `engine.base.Worker.read_blocks`."""
        return self._cache.copies.read(block_ids)

    def write_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Copy KV blocks in; see `engine.base.Worker.write_blocks`."""
        self._cache.copies.write(block_ids, rows)
