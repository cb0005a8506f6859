"""Turn a Hugging Face decoder-only checkpoint, unchanged, into a worker: one pipeline for whole models and rank parts.

The pipeline checks the settings, loads the weights, learns from a probe step what each layer caches and how it attends
(there is no table of architectures), sizes the KV pool, chooses how steps run, and compares the worker with the model's
own forward pass. What a whole model and one rank's part of it do differently is in a `ModelPart`:
`engine.loader.WholeModel` or `engine.parallel.rank_loader.ShardedModel`, whose modules call this one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.checkpoints.locate import locate_checkpoint
from specdec.checkpoints.vocabulary import load_vocabulary, vocabulary_size
from specdec.contract.errors import Unsupported
from specdec.contract.types import BLOCK_TOKENS, SLOTS_PER_SESSION
from specdec.engine.base import KvLayout, ModelShape, Worker
from specdec.engine.cuda_device import cuda_pool_bytes, settle_cuda
from specdec.engine.cuda_graphs.graph_steps import capture_steps, wants_capture
from specdec.engine.linear.row_products import require_kernel
from specdec.engine.local_drafting import LocalDrafting, draft_passes, load_local_drafts
from specdec.engine.model.attention import ATTENTION_NAME, register_attention
from specdec.engine.model.batch_invariance import FIELD, require_batch_invariance, require_keepable
from specdec.engine.model.checkpoint_model import (
    load_config,
    model_context,
    model_shape,
    pick_dtype,
    telling_progress,
)
from specdec.engine.model.kv_cache import KvCache, LayerShape, block_bytes, pool_sizes
from specdec.engine.model.layer_probe import (
    ProbedLayer,
    probe_layers,
    probe_states,
    refusing_failures,
    register_probe,
    steady_context,
)
from specdec.engine.model.model_runner import ForwardPass, GraphSource, ModelRunner, tapped_layers
from specdec.engine.model.self_check import Arithmetic, Reference, require_same, take_reference
from specdec.engine.model.state_pools import StatePools
from specdec.engine.options import AUTO, CUDA_GRAPHS, EAGER, Agreement, CompileOptions, LoadRequest, require_backend
from specdec.engine.torch_compile import compile_steps

_log = logging.getLogger(__name__)


class ModelPart(Protocol):
    """A whole model or one rank's part of it. The defaults are right for a whole model without native kernels."""

    device: torch.device
    model: PreTrainedModel
    """The loaded modules, with the probe as their attention; set by `load`."""
    kv_part: str = "tp1.0"
    """The part of the model that the KV blocks belong to; see `KvLayout.rank`."""
    is_first: bool = True
    """True if this process plans steps and checks the worker; the other ranks follow it."""
    is_native: bool = False
    """True if native kernels run the model, once it is loaded."""
    all_agree: Agreement | None = None
    """Agreement of the processes that run steps together; None if this process runs them alone."""

    @property
    def num_head_rows(self) -> int:
        """Number of logits that the whole model's head gives a row."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def require_settings(self, request: LoadRequest) -> None:
        """Check settings that only this kind of part restricts. Raises InvalidRequest or Unsupported."""
        return

    def wants_cuda_graphs(self, options: CompileOptions) -> bool:
        """Return whether steps are to run in CUDA graphs. Raises Unsupported: they are asked for and impossible."""
        return wants_capture(options, self.device)

    def may_be_native(self, options: CompileOptions) -> bool:
        """Return whether native kernels might run the model, as far as settings tell."""
        return False

    def load(self, request: LoadRequest, directory: Path, config: PreTrainedConfig, dtype: torch.dtype | str) -> None:
        """Load the weights into `model`.

        Args:
            request: what to load.
            directory: the checkpoint's.
            config: the checkpoint's.
            dtype: as `pick_dtype` returns it.

        Raises:
            InvalidRequest, Unsupported: the checkpoint is damaged, or this kind of part does not take it.
        """
        ...

    def require_own_share(self, layers: list[ProbedLayer]) -> None:
        """Check that no more than this part was loaded. Raises Unsupported."""
        return

    def hold_in_int8(self) -> None:
        """Replace the layers' weights by int8 weights of the same shapes, for the row products."""
        ...

    def agree_on_blocks(self, count: Callable[[], int]) -> int:
        """Return how many KV blocks every process has room for; `count` gives this one's, or raises InvalidRequest."""
        return count()

    def arithmetic(self, *, rounds_weights: bool) -> Arithmetic:
        """Return what the worker rounds and `model` does not. `rounds_weights`: whether int8 weights are among it."""
        return Arithmetic(torch.finfo(self.model.dtype).eps)

    def joined(self) -> AbstractContextManager[None]:
        """Make `model` compute the whole model's logits, on every rank, within a `with` block."""
        return nullcontext()

    def native_runner(
        self, request: LoadRequest, source: GraphSource, shape: ModelShape, drafting: LocalDrafting
    ) -> Worker | None:
        """Return a worker that runs steps by native kernels; None if other ways run them."""
        return None

    def forward_pass(self, request: LoadRequest, *, taps: bool) -> ForwardPass:
        """Take `model` apart. `taps`: whether the layers' outputs are needed too."""
        ...

    def keep(
        self, worker: Worker, request: LoadRequest, directory: Path, reference: Reference, longest_context: int
    ) -> None:
        """Keep a worker that passed the self-check for later starts, if this kind of part can be kept.

        `longest_context`: most tokens of a session that the model supports, whatever was requested.
        """
        return

    def lead(self, own: Worker) -> Worker:
        """Wait for the other processes; return the worker that runs steps on all of them, or `own` if it follows."""
        return own


def build_worker(part: ModelPart, request: LoadRequest) -> Worker:
    """Load a model or a rank's part of it with its KV pool; every rank of a group calls this with the same request.

    Raises:
        InvalidRequest: the checkpoint, device, dtype or compile backend does not exist, the KV pool has no room for one
            block, the share of the device's memory cannot be had, or a local draft does not fit the model.
        Unsupported: the model is not decoder-only, or computed differently here than by transformers; or it cannot run
            as the request says on this device.
    """
    return _Load(part, request).run()


class _Load:
    """One load."""

    def __init__(self, part: ModelPart, request: LoadRequest) -> None:
        self._part, self._request, self._options = part, request, request.compiling
        self._by_rows = self._options.multiplies_rows(part.device, is_int8=request.is_int8)
        self._uses_cuda_graphs = False

    def run(self) -> Worker:
        part, request = self._part, self._request
        self._require_settings()
        directory = locate_checkpoint(request.model)
        if request.num_threads is not None:
            torch.set_num_threads(request.num_threads)
        config = load_config(request.model, directory)
        token_to_id = load_vocabulary(directory)
        settle_cuda()
        register_attention()
        register_probe()
        dtype = pick_dtype(request.dtype, part.device, getattr(config, "dtype", None))
        with telling_progress(request.note_loaded):
            part.load(request, directory, config, dtype)
        with refusing_failures(config):
            layers = probe_layers(part.model)
            part.require_own_share(layers)
            if (states := probe_states(part.model)) is not None:
                self._require_plain_steps()
            longest = self._longest_context(config)
            context = min(longest, request.max_context_tokens or longest)
            if request.is_int8 and self._by_rows:
                part.hold_in_int8()  # before the free memory is measured
            drafting = load_local_drafts(request.local_drafts, part.model, vocabulary_size(token_to_id), context)
            shapes = [*(layer.shape for layer in layers), *drafting.layers]
            slot_bytes = 0 if states is None else states.slot_bytes
            num_slots = 0

            def count_blocks() -> int:
                nonlocal num_slots
                num_blocks, num_slots = self._pool_sizes(shapes, slot_bytes, context)
                return num_blocks

            num_blocks = part.agree_on_blocks(count_blocks)
            shape = model_shape(
                part.model, directory, token_to_id, num_blocks, context, part.device, self._layout(shapes, drafting),
                num_head_rows=part.num_head_rows, is_int8=request.is_int8,
            )  # fmt: skip
            shape = replace(shape, local_drafts=drafting.names, local_gammas=drafting.gammas, num_states=num_slots,
                            state_bytes=slot_bytes)  # fmt: skip
            if part.is_first:
                _log.info("KV cache of %d blocks: %d tokens in all, sessions of up to %d", num_blocks,
                          num_blocks * BLOCK_TOKENS, shape.max_context_tokens)  # fmt: skip
            if part.is_first and num_slots:
                _log.info("%d recurrent states of %d bytes: at most %d sessions at once", num_slots, slot_bytes,
                          num_slots // SLOTS_PER_SESSION)  # fmt: skip
            pools = None if states is None else StatePools(states, num_slots, part.device)
            own, reference = self._make_worker(shape, shapes, layers, drafting, pools)
        worker = part.lead(own)
        if part.is_first:
            self._require_right(worker, reference, config)
            if reference is not None:
                part.keep(worker, request, directory, reference, longest)
        return worker

    def _longest_context(self, config: PreTrainedConfig) -> int:
        """Return the most tokens of a session that the model supports, whatever is requested."""
        stated = model_context(config)
        longest = steady_context(self._part.model, stated)
        if longest < stated and self._part.is_first:
            _log.warning(
                "sessions are limited to %d of the model's %d tokens: in a longer sequence its rotary frequencies "
                "change, and tokens computed before would be wrong", longest, stated,
            )  # fmt: skip
        return longest

    def _require_settings(self) -> None:
        """Check everything that can be checked before the model is loaded."""
        part, options, dtype = self._part, self._options, self._request.dtype
        part.require_settings(self._request)
        require_backend(options.backend)
        self._uses_cuda_graphs = part.wants_cuda_graphs(options)
        if self._request.local_drafts and options.uses_torch_compile:
            raise Unsupported(
                f"local drafts do not run with --compile-backend {options.backend}; use --compile-backend auto",
                field="local_draft",
            )
        self._require_keepable(is_native=part.may_be_native(options))
        if self._by_rows:
            require_kernel(FIELD if options.is_deterministic else "dtype")
            if options.backend not in (AUTO, CUDA_GRAPHS, EAGER):
                raise Unsupported(
                    f"dtype {dtype} on {part.device.type} runs in CUDA graphs and eager steps only",
                    field="compile_backend",
                )

    def _require_keepable(self, *, is_native: bool) -> None:
        if self._options.is_deterministic:
            require_keepable(
                self._options, self._part.device, is_native=is_native, uses_cuda_graphs=self._uses_cuda_graphs
            )

    def _require_plain_steps(self) -> None:
        """Check that nothing was requested that steps of a hybrid do not do; they run by PyTorch's operations."""
        options, kind = self._options, self._part.model.config.model_type
        if self._part.all_agree is not None:
            raise Unsupported(
                f"a model of type {kind} has recurrent layers, which are not divided; use 1", field="tensor_parallel"
            )
        if self._request.local_drafts:
            raise Unsupported(
                f"a model of type {kind} has recurrent layers, with which local drafts do not run; use a draft model",
                field="local_draft",
            )
        self._uses_cuda_graphs = False
        self._require_keepable(is_native=False)
        if options.backend not in (AUTO, EAGER):
            raise Unsupported(
                f"a model of type {kind} has recurrent layers, whose steps run by --compile-backend eager or auto",
                field="compile_backend",
            )

    def _pool_sizes(self, shapes: list[LayerShape], slot_bytes: int, context: int) -> tuple[int, int]:
        request, device = self._request, self._part.device
        num_bytes = request.kv_cache_bytes
        if num_bytes is None and request.num_kv_blocks is None and device.type == "cuda":
            num_bytes = cuda_pool_bytes(device, request.gpu_memory_utilization, self._uses_cuda_graphs)
        one_block = block_bytes(shapes, self._part.model.dtype)
        return pool_sizes(one_block, slot_bytes, context, num_bytes, request.num_kv_blocks)

    def _layout(self, shapes: list[LayerShape], drafting: LocalDrafting) -> KvLayout:
        dtype = self._part.model.dtype
        return KvLayout(
            str(dtype).removeprefix("torch."),
            tuple(block_bytes([shape], dtype) for shape in shapes),
            "+".join((self._part.kv_part, *drafting.fingerprints)),
        )

    def _make_worker(
        self,
        shape: ModelShape,
        shapes: list[LayerShape],
        layers: list[ProbedLayer],
        drafting: LocalDrafting,
        states: StatePools | None,
    ) -> tuple[Worker, Reference | None]:
        """Return the worker and what the model itself computes, which is taken before the model is taken apart."""
        part = self._part
        self._require_keepable(is_native=part.is_native)
        kinds = [layer.kind for layer in layers]
        reference = None
        if self._request.self_check:
            if part.is_first:
                _log.info("self-check: comparing with the model's own forward pass")
            with part.joined():
                # Weights of the row products have been rounded already.
                arithmetic = part.arithmetic(rounds_weights=self._request.is_int8 and not self._by_rows)
                reference = take_reference(part.model, shape, kinds, arithmetic)
        part.model.set_attn_implementation(ATTENTION_NAME)
        # The last block is the scratch block of CUDA graphs: padding rows write there.
        num_blocks = shape.num_kv_blocks + self._uses_cuda_graphs
        cache = KvCache(
            shapes, num_blocks=num_blocks, dtype=part.model.dtype, device=part.device, states=states
        )  # fmt: skip
        source = GraphSource(part.model, kinds, cache)
        native = part.native_runner(self._request, source, shape, drafting)
        return native or self._make_runner(source, shape, drafting), reference

    def _make_runner(self, source: GraphSource, shape: ModelShape, drafting: LocalDrafting) -> Worker:
        """Return a worker that runs steps by PyTorch's operations, compiled or in CUDA graphs on request."""
        part, options, dtype = self._part, self._options, source.model.dtype
        forward = part.forward_pass(self._request, taps=bool(drafting.names))
        if options.uses_torch_compile:
            forward = compile_steps(options, source, forward)
        heads, recorded = drafting.paged_heads(source.cache), {}
        if self._uses_cuda_graphs:
            recorded = capture_steps(options, source, forward, shape, part.all_agree, taps=tapped_layers(heads),
                                     exits=drafting.exits)  # fmt: skip
        return ModelRunner(forward, source.cache, source.layer_kinds, shape, dtype=dtype, device=part.device,
                           recorded=recorded, drafts=draft_passes(drafting.exits, source.model, forward),
                           heads=heads)  # fmt: skip

    def _require_right(self, worker: Worker, reference: Reference | None, config: PreTrainedConfig) -> None:
        """Close the worker and raise Unsupported if it does not compute what it should."""
        began_s = time.monotonic()
        try:
            with refusing_failures(config):
                if reference is not None:
                    require_same(worker, reference, config.model_type)
                    _log.info("self-check passed in %.1f s", time.monotonic() - began_s)
                if self._options.is_deterministic:
                    require_batch_invariance(worker)
        except BaseException:
            worker.close()
            raise
