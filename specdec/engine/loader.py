"""Load a whole model into this process and return its worker.

The steps of a load are in `engine.load_pipeline`; here are the weights, the choice of native kernels and the forward
pass of a whole model. Called by `specdec.service.replica_main` and by tests; ranks of a group load their parts by
`engine.parallel.rank_loader`.
"""

from __future__ import annotations

import ctypes
import logging
import time
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.engine.base import ModelShape, Worker
from specdec.engine.kept_worker import keep_worker
from specdec.engine.kernels.library import load_library
from specdec.engine.linear.choice import projection_kinds
from specdec.engine.linear.int8 import Int8Projection, hold_in_int8
from specdec.engine.linear.projection import relayout_linears
from specdec.engine.linear.row_products import RowProjection
from specdec.engine.load_pipeline import ModelPart, build_worker
from specdec.engine.local_drafting import LocalDrafting
from specdec.engine.model.checkpoint_model import has_other_half, pick_device, quietly
from specdec.engine.model.early_exit import decoder_layers
from specdec.engine.model.layer_probe import refusing_failures
from specdec.engine.model.llama_stack import LlamaStack
from specdec.engine.model.llama_twin import llama_twin
from specdec.engine.model.model_runner import ForwardPass, GraphSource, TransformersForward
from specdec.engine.model.self_check import Arithmetic, Reference
from specdec.engine.model.text_half import make_whole, read_model, require_own_attention
from specdec.engine.native.file_layout import FromFile
from specdec.engine.native.file_model import FileModel, open_file_model, tell_if_wider
from specdec.engine.native.model_layout import ModelLayout, fits, llama_numbers, rotary_tables, round_weight
from specdec.engine.native.native_runner import NativeRunner
from specdec.engine.native.packing import Packing
from specdec.engine.options import AUTO, NATIVE, CompileOptions, LoadRequest

_log = logging.getLogger(__name__)


def load_worker(request: LoadRequest) -> Worker:
    """Load a checkpoint and its KV pool.

    Args:
        request: what to load.

    Raises:
        InvalidRequest, Unsupported: as `engine.load_pipeline.build_worker`.
    """
    return build_worker(WholeModel(pick_device(request.device)), request)


class WholeModel(ModelPart):
    """Implements `engine.load_pipeline.ModelPart` by transformers' model and, on a CPU, our native kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._library: ctypes.CDLL | None = None
        self._in_file: FileModel | None = None
        """The model, if its weights stay in a GGUF file."""
        self._from_file: FromFile | None = None

    def may_be_native(self, options: CompileOptions) -> bool:
        return self.device.type == "cpu" and options.backend in (AUTO, NATIVE)

    def load(self, request: LoadRequest, directory: Path, config: PreTrainedConfig, dtype: torch.dtype | str) -> None:
        """Load the weights, and the kernels that are to run them."""
        _log.info("loading weights of %s to %s", request.model, self.device)
        began_s = time.monotonic()
        if self._stays_in_file(request, config):
            self.is_native = True
            return
        self.model = _load_model(request.model, directory, config, dtype, self.device)
        _log.info("loaded weights in %.1f s", time.monotonic() - began_s)
        tell_if_wider(Path(request.model).expanduser(), sum(each.nbytes for each in self.model.parameters()))
        if not request.compiling.multiplies_rows(self.device, is_int8=request.is_int8):
            self._library = self._native_library(request.compiling)
        self.is_native = self._library is not None

    def hold_in_int8(self) -> None:
        hold_in_int8(self.model, RowProjection)

    def arithmetic(self, *, rounds_weights: bool) -> Arithmetic:
        if not rounds_weights:
            return Arithmetic(torch.finfo(self.model.dtype).eps)
        if self.is_native:  # activations have 16 bits, scaled so that a row's largest uses all of them
            return Arithmetic(torch.finfo(torch.float16).eps, round_weight)
        return Arithmetic(torch.finfo(torch.bfloat16).eps, Int8Projection.round_weight)

    def native_runner(
        self, request: LoadRequest, source: GraphSource, shape: ModelShape, drafting: LocalDrafting
    ) -> Worker | None:
        if self._library is None:
            return None
        if self._in_file is not None:
            return self._file_runner(self._in_file, source, shape)
        # The shortest format that holds a weight exactly gives the same bits; float32 asks for weights as they are.
        packing = Packing(self._library, is_compact=request.dtype != "float32")
        layout = ModelLayout(
            packing, self.model, source.cache, source.layer_kinds, shape.max_context_tokens, is_int8=request.is_int8
        )
        exits = {name: layout.early_exit(exit_, self.model.lm_head) for name, exit_ in drafting.exits.items()}
        heads = drafting.paged_heads(source.cache)
        runner = NativeRunner(self._library, layout.packed, source.cache, shape, exits, heads)
        _log.info("native kernels read %.0f MB of weights a step", runner.weight_bytes / 1e6)
        return runner

    def keep(
        self, worker: Worker, request: LoadRequest, directory: Path, reference: Reference, longest_context: int
    ) -> None:
        if isinstance(worker, NativeRunner) and self._library is not None:
            keep_worker(
                worker, request, directory, self._library, reference,
                architecture=self.model.config.model_type, context=longest_context, from_file=self._from_file,
            )  # fmt: skip

    def forward_pass(self, request: LoadRequest, *, taps: bool) -> ForwardPass:
        kinds = projection_kinds(self.model, request.is_int8, request.compiling)
        if LlamaStack.fits(self.model):
            return LlamaStack(self.model, kinds)
        if request.is_int8 or self.device.type == "cpu":
            relayout_linears(self.model, kinds)
        return TransformersForward(self.model, tuple(decoder_layers(self.model)) if taps else ())

    def _stays_in_file(self, request: LoadRequest, config: PreTrainedConfig) -> bool:
        """Take a GGUF file whose weights the kernels pack from the file; return False for other models."""
        if request.local_drafts or request.is_int8 or not self.may_be_native(request.compiling):
            return False
        try:
            library = load_library(request.compiling.directory)
        except Unsupported:
            return False
        in_file = open_file_model(Path(request.model).expanduser(), config, library)
        if in_file is None or not fits(library, in_file.model):
            return False
        self.model, self._library, self._in_file = in_file.model, library, in_file
        return True

    def _file_runner(self, in_file: FileModel, source: GraphSource, shape: ModelShape) -> NativeRunner:
        began_s = time.monotonic()
        self._from_file = FromFile(
            llama_numbers(self.model, source.layer_kinds), rotary_tables(self.model, shape.max_context_tokens)
        )
        packed = in_file.packed(self._from_file, [layer.rows.data_ptr() for layer in source.cache.layers])
        runner = NativeRunner(in_file.library, packed, source.cache, shape)
        _log.info("packed %.0f MB of weights in %.1f s", runner.weight_bytes / 1e6, time.monotonic() - began_s)
        return runner

    def _native_library(self, options: CompileOptions) -> ctypes.CDLL | None:
        """Return the native kernels if they are to run the model; None if other ways are."""
        if not self.may_be_native(options):
            return None
        try:
            library = load_library(options.directory)
        except Unsupported as error:
            if options.backend == NATIVE:
                raise
            _log.warning("native kernels are not available; steps are slower: %s", error.message)
            return None
        if fits(library, self.model):
            return library
        if options.backend == NATIVE:
            raise self._not_native()
        return None

    def _not_native(self) -> Unsupported:
        return Unsupported(
            f"native kernels do not compute a model of type {self.model.config.model_type} of this shape in "
            f"{str(self.model.dtype).removeprefix('torch.')} on {self.device.type}; use --compile-backend auto",
            field="compile_backend",
        )


def _load_model(
    model: str, directory: Path, config: PreTrainedConfig, dtype: torch.dtype | str, device: torch.device
) -> PreTrainedModel:
    require_own_attention(model, config)
    try:
        loaded = read_model(model, directory, config, dtype)
    except InvalidRequest:
        # If the class cannot be made even without weights, the checkpoint is not the cause.
        with refusing_failures(config), quietly():
            make_whole(config)
        raise
    # The decorator that transformers puts on `to` loses `self`.
    placed: PreTrainedModel = loaded.to(device)  # type: ignore[arg-type]
    if not has_other_half(config):
        return placed
    with refusing_failures(config):
        return llama_twin(placed)
