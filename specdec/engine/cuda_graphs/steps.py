"""Small steps through recordings of themselves (`--compile-backend captured`), the default on a CUDA device.

A draft step or a verification is a few hundred kernels of a few microseconds each, and launching them one by one takes
longer than running them. So the eager pass of a Llama-shaped model is recorded once for each of a few sizes
(`engine.cuda_graphs.buckets`), over buffers that stay; a step copies its numbers into the buffers of the smallest size
that holds it and replays. Prefill chunks and larger steps are not recorded, other models run eagerly.

Not here: the arithmetic, which is the eager pass's own (`engine.model.llama_stack`), and who sees whom
(`engine.cuda_graphs.static_attention`). Built by `engine.loader`, called by `engine.model.model_runner`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from types import MappingProxyType

import torch

from specdec.engine.base import ModelShape, SequenceSlice
from specdec.engine.cuda_graphs.attention_choice import choose_attention
from specdec.engine.cuda_graphs.buckets import Bucket, Buckets
from specdec.engine.cuda_graphs.capture import CudaCapture
from specdec.engine.cuda_graphs.fused_stack import fuse_stack
from specdec.engine.cuda_graphs.multi_step import FollowUp, last_tokens
from specdec.engine.cuda_graphs.paged_attention import PagedAttention
from specdec.engine.cuda_graphs.ragged_steps import RaggedSteps
from specdec.engine.cuda_graphs.static_attention import StaticAttention
from specdec.engine.cuda_graphs.static_inputs import StaticInputs, StepNumbers, input_size
from specdec.engine.model.early_exit import EarlyExit
from specdec.engine.model.kv_cache import KvCache
from specdec.engine.model.llama_stack import LlamaStack, RowForward, RowPass, StepPass
from specdec.engine.model.model_runner import FULL, ForwardPass, GraphSource, LayerOutputs
from specdec.engine.model.start_progress import shown
from specdec.engine.options import AUTO, CAPTURED, PAGED, Agreement, Capture, CompileOptions, first_line
from specdec.errors import Unsupported

_log = logging.getLogger(__name__)

# A draft step has one row of each session.
_DRAFT_ROWS = (1,)


def wants_capture(options: CompileOptions, device: torch.device) -> bool:
    """Whether steps are to be captured where the model allows it; the KV pool then needs a scratch block.

    Raises:
        Unsupported: they are to be, and there is nothing to record them with.
    """
    is_possible = device.type == "cuda" or options.capture is not None
    if options.backend == CAPTURED and not is_possible:
        raise Unsupported(f"captured steps need a CUDA device, not {device.type}", field="compile_backend")
    return is_possible and options.backend in (AUTO, CAPTURED) and bool(options.row_counts)


def capture_steps(
    options: CompileOptions,
    source: GraphSource,
    forward: ForwardPass,
    shape: ModelShape,
    all_agree: Agreement | None = None,
    *,
    taps: Sequence[int] = (),
    exits: Mapping[str, EarlyExit] = MappingProxyType({}),
) -> dict[str, CapturedSteps]:
    """Records the steps of a service that `wants_capture`.

    Args:
        options: what to record: `row_counts` are the rows of one sequence.
        source: the model, as it was loaded; its cache has one block more than `shape` says.
        forward: its eager pass.
        shape: the worker's.
        all_agree: whether all who run these steps together say so; each of them asks the same questions. None: nobody
            else runs them. Where somebody does, a failure in the middle of a step, as for want of memory, is final:
            the others wait in it.
        taps: layers whose outputs full steps hand over.
        exits: whose draft steps are captured too, by the name of the local draft.

    Returns:
        Full steps as `FULL`, and those of `exits`; nothing where steps stay eager, which one log line says.

    Raises:
        Unsupported: they were asked for, by name or for their promise, and cannot be captured.
    """
    asked_for_by = "compile_backend" if options.backend == CAPTURED else None
    if options.is_deterministic:  # the eager pass attends, and adds up, in an order that depends on the step
        asked_for_by = "deterministic"
    if not isinstance(forward, LlamaStack):
        problem = f"a model of type {source.model.config.model_type} has no captured steps"
        if asked_for_by:
            raise Unsupported(problem, field=asked_for_by)
        _log.info("%s: it runs eagerly", problem)
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
        captured = {}
        for name, step_pass in passes.items():
            row_counts = _DRAFT_ROWS if name in exits else options.row_counts
            buckets = Buckets(row_counts, attention.context_steps, shape.max_context_tokens)
            ragged = None
            if isinstance(attention, PagedAttention):
                ragged = RaggedSteps(step_pass, source.cache, source.layer_kinds,
                                     takes_whole_prompts=options.is_deterministic)  # fmt: skip
            num_taps = 0 if name in exits else len(taps)
            steps = CapturedSteps(step_pass, source.cache, attention, buckets, shape.vocabulary_size, ragged,
                                  num_taps=num_taps, hidden_size=forward.hidden_size)  # fmt: skip
            steps.record(capture, may_lack_room=all_agree is None)
            captured[name] = steps
    except Exception as error:  # a driver, a library or the memory of the device: the eager pass may still run
        problem = f"steps cannot be captured here: {first_line(error)}"
        if asked_for_by:
            raise Unsupported(problem, field=asked_for_by) from error
        _log.warning("%s; they run eagerly", problem)
        return {}
    _log.info(
        "captured %d of %d step graphs with %s attention in %.1f s",
        num_recorded := sum(steps.num_recorded for steps in captured.values()),
        num_recorded + sum(steps.num_without_room for steps in captured.values()),
        attention.name,
        time.monotonic() - began_s,
    )
    return captured


def _untapped(forward: RowForward) -> StepPass:
    return lambda batch, context: (forward(batch, context), [])


class CapturedSteps:
    """The recordings of one worker. Not thread-safe: one step at a time, as the worker's."""

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
        """Allocates the buffers.

        Args:
            step_pass: of the model.
            cache: the pool; its last block is the scratch block, which no sequence may have.
            attention: over `cache`.
            buckets: what to record.
            vocabulary_size: of each row of logits so many are kept.
            ragged: runs what no recording holds; None: the eager pass does.
            num_taps: layers whose outputs `step_pass` gives.
            hidden_size: of those.
        """
        self._pass = step_pass
        self._attention = attention
        self._ragged = ragged
        self._buckets = buckets
        self._scratch_block = cache.num_blocks - 1
        pool, sizes = cache.layers[0].blocks, buckets.largest_first()
        most_rows = max((bucket.num_rows for bucket in sizes), default=0)
        # Steps of one row follow others on the device: what they read must not lie where the others' numbers do.
        most_numbers = [0, 0]
        for bucket in sizes:
            size = input_size(bucket, keeps_tables=attention.tables is not None)
            most_numbers[bucket.width == 1] = max(most_numbers[bucket.width == 1], size)
        self._numbers = [StepNumbers(most, pool.device) for most in most_numbers]
        self._logits = torch.zeros(most_rows, vocabulary_size, dtype=torch.float32, device=pool.device)
        self._hidden = [torch.zeros(most_rows, hidden_size, dtype=pool.dtype, device=pool.device)
                        for _ in range(num_taps)]  # fmt: skip
        self.outputs = LayerOutputs((), self._numbers[0].on_device[:0])
        """Of the step that was run last."""
        self._steps: dict[Bucket, tuple[StaticInputs, Callable[[], None]]] = {}
        self._newest: StaticInputs | None = None
        self.num_without_room = 0
        """Buckets that the device had no memory left for."""

    @property
    def num_recorded(self) -> int:
        return len(self._steps)

    def record(self, capture: Capture, *, may_lack_room: bool) -> None:
        """Records the buckets, largest first, while the buffers hold nothing but padding.

        Args:
            capture: records.
            may_lack_room: whether a bucket that the device's memory is too small for stays eager.

        Raises:
            OutOfMemoryError: the memory is too small, and it may not.
        """
        parts = [list(part) for _, part in groupby(self._buckets.largest_first(), lambda bucket: bucket.num_sequences)]
        with torch.inference_mode():
            for part in shown(parts, "capturing step graphs", lambda part: f"{part[0].num_sequences} sequences"):
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
        """Has the kernel between two draft steps compiled now: in a draft it would be seconds that look like a hang."""
        for bucket, (inputs, _) in self._steps.items():
            if bucket.width == 1 and inputs.tables is not None:
                nothing = inputs.on_device.token_ids.view(-1)[:0]
                FollowUp(inputs, lambda: None, 0, self._scratch_block).run(nothing)
                return

    def _step_of(self, inputs: StaticInputs) -> Callable[[], None]:
        def step() -> None:
            batch, context = self._attention.lay_out(inputs)
            logits, outputs = self._pass(batch, context)
            logits = logits[:, : self._logits.shape[1]]
            self._logits[: len(logits), : logits.shape[1]].copy_(logits)  # most ranks of several have a part of them
            for kept, output in zip(self._hidden, outputs, strict=True):
                kept[: len(output)].copy_(output)

        return step

    def run(self, slices: Sequence[SequenceSlice]) -> torch.Tensor | None:
        """Runs a step that one of the recordings holds, or that needs none; within inference mode.

        Returns:
            [R, at least vocabulary_size] logits, valid until the next step; None: nothing was run.
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
    def may_follow(self) -> bool:
        """Whether `can_follow` is ever true: tables are on the device, and steps of one row recorded."""
        return self._attention.tables is not None and any(bucket.width == 1 for bucket in self._steps)

    def can_follow(self, slices: Sequence[SequenceSlice]) -> bool:
        """Whether `multi_step` works after a step of these slices."""
        bucket = self._buckets.smallest_for(last_tokens(slices))
        return self.may_follow and bucket in self._steps and bucket.width == 1

    def multi_step(self, slices: Sequence[SequenceSlice]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Further steps of a step's sequences, one token each; within inference mode.

        Args:
            slices: what was run last, of one logit row each; their tables reach as far as the further steps do.

        Returns:
            Of the tokens, int64 on the device, in the order of the slices: their logits as from `run`. The next step of
            another kind ends it.
        """
        slices = last_tokens(slices)
        bucket = self._buckets.smallest_for(slices)
        assert bucket is not None
        inputs, replay = self._steps[bucket]
        if self._newest is not inputs:
            inputs.fill(slices)
            tables = self._attention.tables
            assert tables is not None
            # Slots are looked up before the first of the steps applies what its numbers bring.
            tables.apply(inputs.on_device.changed_at, inputs.on_device.changed_to)
        steps = FollowUp(inputs, replay, len(slices), self._scratch_block)

        def run(token_ids: torch.Tensor) -> torch.Tensor:
            steps.run(token_ids)
            return self._logits[: len(slices)]

        return run
