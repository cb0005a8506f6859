"""Small steps as CUDA graphs (`--compile-backend cuda-graphs`), the default on a CUDA device.

A draft step or a verification consists of a few hundred kernels of a few microseconds each, and launching them one by
one takes longer than running them. The eager pass of a Llama-shaped model (`engine.model.llama_stack`) is therefore
recorded once for each of a few sizes (`engine.cuda_graphs.buckets`), over fixed buffers. A step copies its inputs into
the buffers of the smallest size that holds it and replays the graph. Prefill chunks and larger steps are not recorded,
and other models run eagerly. Built by `engine.loader`, called by `engine.model.model_runner`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from types import MappingProxyType

import torch

from specdec.contract.errors import Unsupported
from specdec.engine.base import ModelShape, SequenceSlice
from specdec.engine.cuda_graphs.attention_choice import choose_attention
from specdec.engine.cuda_graphs.buckets import Bucket, Buckets
from specdec.engine.cuda_graphs.capture import CudaCapture, MultiStepReplay, last_tokens
from specdec.engine.cuda_graphs.fused_stack import fuse_stack
from specdec.engine.cuda_graphs.paged_attention import PagedAttention
from specdec.engine.cuda_graphs.ragged_steps import RaggedSteps
from specdec.engine.cuda_graphs.static_attention import StaticAttention
from specdec.engine.cuda_graphs.static_inputs import StaticInputs, StepNumbers, input_size
from specdec.engine.model.early_exit import EarlyExit
from specdec.engine.model.kv_cache import KvCache
from specdec.engine.model.llama_stack import LlamaStack, RowForward, RowPass, StepPass
from specdec.engine.model.model_runner import FULL, ForwardPass, GraphSource, LayerOutputs
from specdec.engine.model.start_progress import shown
from specdec.engine.options import AUTO, CUDA_GRAPHS, PAGED, Agreement, Capture, CompileOptions, first_line

_log = logging.getLogger(__name__)

# A draft step has one row per session.
_DRAFT_ROWS = (1,)


def wants_capture(options: CompileOptions, device: torch.device) -> bool:
    """Return whether to record CUDA graphs if the model supports them; the KV pool then needs a scratch block.

    Raises:
        Unsupported: the options name CUDA graphs, and the device cannot record them.
    """
    is_possible = device.type == "cuda" or options.capture is not None
    if options.backend == CUDA_GRAPHS and not is_possible:
        raise Unsupported(f"CUDA graphs need a CUDA device, not {device.type}", field="compile_backend")
    return is_possible and options.backend in (AUTO, CUDA_GRAPHS) and bool(options.row_counts)


def capture_steps(
    options: CompileOptions,
    source: GraphSource,
    forward: ForwardPass,
    shape: ModelShape,
    all_agree: Agreement | None = None,
    *,
    taps: Sequence[int] = (),
    exits: Mapping[str, EarlyExit] = MappingProxyType({}),
) -> dict[str, CudaGraphSteps]:
    """Record the steps of a service that `wants_capture`.

    Args:
        options: compile options; `row_counts` are the rows per sequence to record.
        source: the loaded model; its cache has one block more than `shape` says.
        forward: the model's eager pass.
        shape: the worker's shape.
        all_agree: returns whether all ranks of the model report success; every rank calls it at the same points. None:
            this is the only rank. With other ranks, a failure in the middle of a step, such as a lack of memory, is
            final, because they wait in that step.
        taps: layers whose outputs a full step returns.
        exits: early exits whose draft steps are recorded too, by the name of the local draft.

    Returns:
        The full steps under `FULL`, and those of each exit. Empty, after one log line, if steps stay eager.

    Raises:
        Unsupported: `compile_backend` or `deterministic` requires CUDA graphs, and they cannot be recorded.
    """
    required_by = "compile_backend" if options.backend == CUDA_GRAPHS else None
    if options.is_deterministic:  # in the eager pass, the order of attention's sums depends on the step
        required_by = "deterministic"
    if not isinstance(forward, LlamaStack):
        problem = f"a model of type {source.model.config.model_type} cannot run as CUDA graphs"
        if required_by:
            raise Unsupported(problem, field=required_by)
        _log.info("%s; running eagerly", problem)
        return {}
    device = source.cache.layers[0].blocks.device
    began_s = time.monotonic()
    try:
        capture = options.capture or CudaCapture(device)
        attention = choose_attention(
            source.cache,
            source.layer_kinds,
            capture,
            PAGED if options.is_deterministic else options.attention,
            shape.max_context_tokens,
            all_agree,
        )
        stack: RowPass = forward
        if isinstance(attention, PagedAttention):
            stack = fuse_stack(forward, source.cache, attention, capture, all_agree) or stack
        elif options.is_deterministic:
            raise RuntimeError("--deterministic needs paged attention")
        passes: dict[str, StepPass] = {FULL: partial(stack.with_outputs, layers=taps)}
        passes |= {name: _untapped(stack.early_exit(early_exit)) for name, early_exit in exits.items()}
        recorded = {}
        for name, step_pass in passes.items():
            row_counts = _DRAFT_ROWS if name in exits else options.row_counts
            buckets = Buckets(row_counts, attention.context_steps, shape.max_context_tokens)
            ragged = None
            if isinstance(attention, PagedAttention):
                ragged = RaggedSteps(step_pass, source.cache, source.layer_kinds,
                                     takes_whole_prompts=options.is_deterministic)  # fmt: skip
            num_taps = 0 if name in exits else len(taps)
            steps = CudaGraphSteps(step_pass, source.cache, attention, buckets, shape.vocabulary_size, ragged,
                                  num_taps=num_taps, hidden_size=forward.hidden_size)  # fmt: skip
            steps.record(capture, may_lack_room=all_agree is None)
            recorded[name] = steps
    except Exception as error:  # raised by a driver, a library or the allocator: the eager pass may still run
        problem = f"recording CUDA graphs failed: {first_line(error)}"
        if required_by:
            raise Unsupported(problem, field=required_by) from error
        _log.warning("%s; running eagerly", problem)
        return {}
    _log.info(
        "recorded %d of %d CUDA graphs with %s attention in %.1f s",
        num_recorded := sum(steps.num_recorded for steps in recorded.values()),
        num_recorded + sum(steps.num_without_room for steps in recorded.values()),
        attention.name,
        time.monotonic() - began_s,
    )
    return recorded


def _untapped(forward: RowForward) -> StepPass:
    return lambda batch, context: (forward(batch, context), [])


class CudaGraphSteps:
    """The CUDA graphs of one kind of step of a worker. Not thread-safe: it runs one step at a time."""

    def __init__(
        self,
        step_pass: StepPass,
        cache: KvCache,
        attention: StaticAttention,
        buckets: Buckets,
        vocabulary_size: int,
        ragged: RaggedSteps | None = None,
        *,
        num_taps: int = 0,
        hidden_size: int = 0,
    ) -> None:
        """Allocate the buffers.

        Args:
            step_pass: the model's forward pass.
            cache: the KV pool; its last block is the scratch block, which no sequence may have.
            attention: the attention over `cache`.
            buckets: the sizes to record.
            vocabulary_size: number of logits kept of each row.
            ragged: runs steps that no bucket holds; None: the eager pass runs them.
            num_taps: number of layers whose outputs `step_pass` returns.
            hidden_size: numbers per row of those outputs.
        """
        self._pass = step_pass
        self._attention = attention
        self._ragged = ragged
        self._buckets = buckets
        self._scratch_block = cache.num_blocks - 1
        pool, sizes = cache.layers[0].blocks, buckets.largest_first()
        most_rows = max((bucket.num_rows for bucket in sizes), default=0)
        # A multi-step draft replays one-row steps after a wider step, so their inputs need separate memory.
        most_numbers = [0, 0]
        for bucket in sizes:
            size = input_size(bucket, keeps_tables=attention.tables is not None)
            most_numbers[bucket.width == 1] = max(most_numbers[bucket.width == 1], size)
        self._numbers = [StepNumbers(most, pool.device) for most in most_numbers]
        self._logits = torch.zeros(most_rows, vocabulary_size, dtype=torch.float32, device=pool.device)
        self._hidden = [torch.zeros(most_rows, hidden_size, dtype=pool.dtype, device=pool.device)
                        for _ in range(num_taps)]  # fmt: skip
        self.outputs = LayerOutputs((), self._numbers[0].on_device[:0])
        """Outputs of the tapped layers in the last step."""
        self._steps: dict[Bucket, tuple[StaticInputs, Callable[[], None]]] = {}
        self._newest: StaticInputs | None = None
        self.num_without_room = 0
        """Number of buckets that the device had no memory for."""

    @property
    def num_recorded(self) -> int:
        return len(self._steps)

    def record(self, capture: Capture, *, may_lack_room: bool) -> None:
        """Record the buckets, largest first, while the buffers hold padding only.

        Args:
            capture: records a step.
            may_lack_room: whether a bucket stays eager if the device has no memory for it.

        Raises:
            OutOfMemoryError: the device has no memory for a bucket, and `may_lack_room` is false.
        """
        parts = [list(part) for _, part in groupby(self._buckets.largest_first(), lambda bucket: bucket.num_sequences)]
        with torch.inference_mode():
            for part in shown(parts, "recording CUDA graphs", lambda part: f"{part[0].num_sequences} sequences"):
                for bucket in part:
                    inputs = StaticInputs(
                        bucket, self._numbers[bucket.width == 1], self._scratch_block, self._attention.tables
                    )
                    inputs.fill(())
                    try:
                        self._steps[bucket] = inputs, capture(self._step_of(inputs))
                    except torch.OutOfMemoryError:
                        if not may_lack_room:
                            raise
                        self.num_without_room += 1
            self._prepare_multi_step()

    def _prepare_multi_step(self) -> None:
        """Compile the kernel between two draft steps, which would delay the first multi-step draft by seconds."""
        for bucket, (inputs, _) in self._steps.items():
            if bucket.width == 1 and inputs.tables is not None:
                no_tokens = inputs.on_device.token_ids.view(-1)[:0]
                MultiStepReplay(inputs, lambda: None, 0, self._scratch_block).run(no_tokens)
                return

    def _step_of(self, inputs: StaticInputs) -> Callable[[], None]:
        def step() -> None:
            batch, context = self._attention.lay_out(inputs)
            logits, outputs = self._pass(batch, context)
            logits = logits[:, : self._logits.shape[1]]
            # Ranks other than the first hold a part of the columns only.
            self._logits[: len(logits), : logits.shape[1]].copy_(logits)
            for kept, output in zip(self._hidden, outputs, strict=True):
                kept[: len(output)].copy_(output)

        return step

    def run(self, slices: Sequence[SequenceSlice]) -> torch.Tensor | None:
        """Run a step as a CUDA graph or with the paged kernels, within inference mode.

        Returns:
            Logits [R, at least vocabulary_size], valid until the next step; None if the step is left to the eager pass.
        """
        bucket = self._buckets.smallest_for(slices)
        self._newest = None
        if bucket not in self._steps:
            return self._run_unrecorded(slices)
        inputs, replay = self._steps[bucket]
        inputs.fill(slices)
        replay()
        self._newest = inputs
        slots = inputs.on_device.slots.view(-1)
        self.outputs = LayerOutputs([kept[: len(slots)] for kept in self._hidden], slots)
        return self._logits[: sum(piece.num_logit_rows for piece in slices)]

    def _run_unrecorded(self, slices: Sequence[SequenceSlice]) -> torch.Tensor | None:
        step = None if self._ragged is None else self._ragged.run(slices)
        if step is None:
            return None
        logits, self.outputs = step
        return logits

    @property
    def supports_multi_step(self) -> bool:
        """True if `fits_multi_step` can be: tables stay on the device, and one-row steps are recorded."""
        return self._attention.tables is not None and any(bucket.width == 1 for bucket in self._steps)

    def fits_multi_step(self, slices: Sequence[SequenceSlice]) -> bool:
        """Return whether `multi_step` works after a step of these slices."""
        bucket = self._buckets.smallest_for(last_tokens(slices))
        return self.supports_multi_step and bucket in self._steps and bucket.width == 1

    def multi_step(self, slices: Sequence[SequenceSlice]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Prepare further steps of one token per sequence after a step, within inference mode.

        Args:
            slices: the last step's slices, with one logit row each; their tables cover all further steps.

        Returns:
            A function that runs one token per slice (int64 on the device, in the order of the slices) and returns
            logits as `run` does. It is valid until another step runs.
        """
        slices = last_tokens(slices)
        bucket = self._buckets.smallest_for(slices)
        assert bucket is not None
        inputs, replay = self._steps[bucket]
        if self._newest is not inputs:
            inputs.fill(slices)
            tables = self._attention.tables
            assert tables is not None
            # The kernel between the steps looks up slots before the first replay would apply these changes.
            tables.apply(inputs.on_device.changed_at, inputs.on_device.changed_to)
        steps = MultiStepReplay(inputs, replay, len(slices), self._scratch_block)

        def run(token_ids: torch.Tensor) -> torch.Tensor:
            steps.run(token_ids)
            return self._logits[: len(slices)]

        return run
