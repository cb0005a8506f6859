"""Turns a Hugging Face decoder-only checkpoint, unchanged, into a worker.

Loads the model with our attention in place of transformers', learns from a probe step what each layer caches and how
it attends (no table of architectures), sizes the KV pool, and compares the worker with the model's own forward pass.
Not here: what a step computes (`specdec.engine.model`, `torch_compile`, `captured`, `native`). Called by the services'
entry points and by tests.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specdec.checkpoints.locate import locate_checkpoint
from specdec.checkpoints.vocabulary import load_vocabulary, vocabulary_size
from specdec.engine.base import KvLayout, ModelShape, Worker
from specdec.engine.cuda_graphs.steps import capture_steps, wants_capture
from specdec.engine.cuda_settings import settle_cuda
from specdec.engine.kernels.library import load_library
from specdec.engine.linear.choice import projection_kinds
from specdec.engine.linear.int8 import Int8Projection, hold_in_int8
from specdec.engine.linear.projection import relayout_linears
from specdec.engine.linear.row_products import RowProjection, require_kernel
from specdec.engine.local_drafting import LocalDrafting, draft_passes, load_local_drafts
from specdec.engine.model.attention import ATTENTION_NAME, register_attention
from specdec.engine.model.batch import AttentionKind
from specdec.engine.model.batch_invariance import FIELD, require_batch_invariance, require_keepable
from specdec.engine.model.checkpoint_model import (
    first_line,
    load_config,
    model_context,
    model_shape,
    pick_device,
    pick_dtype,
    pool_blocks,
    quietly,
    require_all_weights,
)
from specdec.engine.model.device_memory import cuda_pool_bytes
from specdec.engine.model.early_exit import decoder_layers
from specdec.engine.model.graph_source import GraphSource
from specdec.engine.model.kv_cache import KvCache, block_bytes
from specdec.engine.model.layer_probe import PROBE_NAME, probe_layers, refusing_failures, register_probe
from specdec.engine.model.llama_stack import LlamaStack
from specdec.engine.model.model_runner import ForwardPass, ModelRunner, TransformersForward, tapped_layers
from specdec.engine.model.self_check import Arithmetic, require_same, take_reference
from specdec.engine.model.thread_tuning import settle_threads
from specdec.engine.native.runner import NativeRunner
from specdec.engine.options import AUTO, CUDA_GRAPHS, EAGER, NATIVE, CompileOptions, require_backend
from specdec.engine.torch_compile import compile_steps
from specdec.errors import InvalidRequest, Unsupported
from specdec.settings.draft_specs import LocalDraftSpec
from specdec.types import BLOCK_TOKENS

_log = logging.getLogger(__name__)


def load_worker(
    model: str,
    *,
    device: str,
    dtype: str,
    kv_cache_bytes: int | None = None,
    gpu_memory_utilization: float | None = None,
    num_kv_blocks: int | None = None,
    max_context_tokens: int | None = None,
    num_threads: int | None = None,
    measures_threads: bool = False,
    compiling: CompileOptions | None = None,
    self_check: bool = True,
    local_drafts: Sequence[LocalDraftSpec] = (),
) -> Worker:
    """Loads a checkpoint and its KV pool.

    Args:
        model: a checkpoint directory, a GGUF file or a hub id.
        device: `cpu`, `cuda` or `cuda:N`; `auto` is CUDA where there is one.
        dtype: `float32`, `bfloat16` or `float16`; `auto` is the checkpoint's own on a GPU, and on a CPU float32, with
            weights kept in 16 bits where the checkpoint stores them so: the same numbers, the same text, half the
            memory read. `int8` rounds the weights of the layers' products; all else is as in `auto`, on a GPU in 16
            bits.
        kv_cache_bytes: bytes of the KV pool.
        gpu_memory_utilization: share of a CUDA device's whole memory for weights, KV pool and working memory together,
            where `kv_cache_bytes` is not given; None: nearly all that is free.
        num_kv_blocks: blocks of the KV pool, instead.
        max_context_tokens: serve no longer sequences, where the model could; None: all that it was made for.
        num_threads: CPU threads of PyTorch, for the whole process; None leaves them.
        measures_threads: on a CPU, settle those by measurement once all is loaded.
        compiling: what is compiled or captured, here and now; None: the native kernels where they compute the model.
        self_check: compare the worker's logits with the model's own forward pass, and refuse one that differs.
        local_drafts: what it is to draft with by itself, under different names.

    Raises:
        InvalidRequest: no such checkpoint, device, dtype or compile backend, no room for a single block, or not the
            share of the device's memory that is asked for; or a local draft does not fit the model.
        Unsupported: not a decoder-only model, one that is computed differently here than by transformers, a backend
            that cannot compile or capture it or does not take int8 on this device, one that cannot draft locally, or
            steps whose rows depend on each other where they must not.
    """
    compiling = compiling or CompileOptions()
    require_backend(compiling.backend)
    directory = locate_checkpoint(model)
    torch_device = pick_device(device)
    uses_cuda_graphs, is_int8 = wants_capture(compiling, torch_device), dtype == "int8"
    if local_drafts and compiling.uses_torch_compile:
        raise Unsupported("local drafts run in native, captured and eager steps: take --compile-backend auto",
                          field="local_draft")  # fmt: skip
    if compiling.is_deterministic:  # what can be told before the model is there
        may_be_native = torch_device.type == "cpu" and compiling.backend in (AUTO, NATIVE)
        require_keepable(compiling, torch_device, is_native=may_be_native, uses_cuda_graphs=uses_cuda_graphs)
    by_rows = compiling.multiplies_rows(torch_device, is_int8=is_int8)
    if by_rows:
        require_kernel(FIELD if compiling.is_deterministic else "dtype")
        if compiling.backend not in (AUTO, CUDA_GRAPHS, EAGER):
            raise Unsupported(f"dtype {dtype} on {torch_device.type} runs in captured and eager steps only",
                              field="compile_backend")  # fmt: skip
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    config = load_config(model, directory)
    token_to_id = load_vocabulary(directory)
    _log.info("loading weights of %s to %s", model, torch_device)
    began_s = time.monotonic()
    own_dtype = getattr(config, "dtype", None)
    loaded = _load_model(model, directory, config, pick_dtype(dtype, torch_device, own_dtype), torch_device)
    if is_int8 and by_rows:
        hold_in_int8(loaded, RowProjection)  # before anybody asks how much memory is left
    _log.info("loaded weights in %.1f s", time.monotonic() - began_s)
    context = min(model_context(loaded.config), max_context_tokens or sys.maxsize)
    with refusing_failures(config):
        layers = probe_layers(loaded)
        if kv_cache_bytes is None and num_kv_blocks is None and torch_device.type == "cuda":
            kv_cache_bytes = cuda_pool_bytes(torch_device, gpu_memory_utilization, uses_cuda_graphs)
        shapes, kinds = [layer.shape for layer in layers], [layer.kind for layer in layers]
        drafting = load_local_drafts(local_drafts, loaded, vocabulary_size(token_to_id), context)
        shapes += drafting.layers
        bytes_per_block = block_bytes(shapes, loaded.dtype)
        blocks = pool_blocks(bytes_per_block, context, kv_cache_bytes, num_kv_blocks)
        layout = KvLayout(
            str(loaded.dtype).removeprefix("torch."),
            tuple(block_bytes([shape], loaded.dtype) for shape in shapes),
            drafting.rank,
        )
        shape = model_shape(
            loaded, directory, token_to_id, blocks, context, torch_device, layout,
            num_head_rows=loaded.get_output_embeddings().weight.shape[0], is_int8=is_int8,
        )  # fmt: skip
        shape = replace(shape, local_drafts=drafting.names, local_gammas=drafting.gammas)
        _log.info("KV cache of %d blocks: %d tokens in all, sessions of up to %d", blocks, blocks * BLOCK_TOKENS,
                  shape.max_context_tokens)  # fmt: skip
        library = None if by_rows else _native_library(compiling, loaded)
        if compiling.is_deterministic:
            require_keepable(compiling, torch_device, is_native=library is not None, uses_cuda_graphs=uses_cuda_graphs)
        reference = None
        if self_check:
            _log.info("self-check: comparing with the model's own forward pass")
            began_s = time.monotonic()
            rounds_weights = is_int8 and not by_rows  # else they are rounded already
            reference = take_reference(loaded, shape, kinds, _arithmetic(loaded, rounds_weights, library is not None))
        loaded.set_attn_implementation(ATTENTION_NAME)
        # The last block is the captured steps' own: what they store of padding.
        cache = KvCache(shapes, num_blocks=blocks + uses_cuda_graphs, dtype=loaded.dtype, device=torch_device)
        worker = _make_worker(loaded, cache, kinds, shape, compiling, library, drafting, is_compact=dtype != "float32")
        if reference is not None:
            require_same(worker, reference, config.model_type)
            _log.info("self-check passed in %.1f s", time.monotonic() - began_s)
        if compiling.is_deterministic:
            require_batch_invariance(worker)
    if measures_threads:
        settle_threads(worker)
    return worker


def _make_worker(
    model: PreTrainedModel,
    cache: KvCache,
    kinds: list[AttentionKind],
    shape: ModelShape,
    compiling: CompileOptions,
    library: ctypes.CDLL | None,
    drafting: LocalDrafting,
    *,
    is_compact: bool,
) -> Worker:
    """Takes the model apart. `is_compact`: see `NativeRunner`."""
    is_int8, dtype, device = shape.dtype == "int8", model.dtype, model.device
    if library is not None:
        runner = NativeRunner(library, model, cache, kinds, shape, drafting.exits, drafting.paged_heads(cache),
                              is_int8=is_int8, is_compact=is_compact)  # fmt: skip
        _log.info("native kernels read %.0f MB of weights a step", runner.weight_bytes / 1e6)
        return runner
    source = GraphSource(model, kinds, cache)
    forward = _forward_pass(model, is_int8, compiling, taps=bool(drafting.names))
    if compiling.uses_torch_compile:
        forward = compile_steps(compiling, source, forward)
    heads, recorded = drafting.paged_heads(cache), {}
    if cache.num_blocks > shape.num_kv_blocks:  # it has the scratch block of captured steps
        recorded = capture_steps(compiling, source, forward, shape, taps=tapped_layers(heads), exits=drafting.exits)
    return ModelRunner(forward, cache, kinds, shape, dtype=dtype, device=device, recorded=recorded,
                       drafts=draft_passes(drafting.exits, model, forward), heads=heads)  # fmt: skip


def _arithmetic(model: PreTrainedModel, rounds_weights: bool, is_native: bool) -> Arithmetic:
    """What the worker to be made of `model` rounds."""
    if not rounds_weights:
        return Arithmetic(torch.finfo(model.dtype).eps)
    if is_native:  # activations have 16 bits, of which a row's largest takes all
        return Arithmetic(torch.finfo(torch.float16).eps, NativeRunner.round_weight)
    return Arithmetic(torch.finfo(torch.bfloat16).eps, Int8Projection.round_weight)


def _native_library(compiling: CompileOptions, model: PreTrainedModel) -> ctypes.CDLL | None:
    """The kernels, if `model` is to run through them."""
    if compiling.backend not in (AUTO, NATIVE) or model.device.type != "cpu":
        return None
    try:
        library = load_library(compiling.directory)
    except Unsupported as error:
        if compiling.backend == NATIVE:
            raise
        _log.warning("slower without native kernels: %s", error.message)
        return None
    if NativeRunner.fits(library, model):
        return library
    if compiling.backend == NATIVE:
        raise Unsupported(
            f"native kernels do not compute a model of type {model.config.model_type} of this shape in "
            f"{str(model.dtype).removeprefix('torch.')} on {model.device.type}",
            field="compile_backend",
        )
    return None


def _forward_pass(
    model: PreTrainedModel, is_int8: bool, compiling: CompileOptions, *, taps: bool = False
) -> ForwardPass:
    """`taps`: the layers' outputs are wanted too."""
    kinds = projection_kinds(model, is_int8, compiling)
    if LlamaStack.fits(model):
        return LlamaStack(model, kinds)
    if is_int8 or model.device.type == "cpu":
        relayout_linears(model, kinds)
    return TransformersForward(model, tuple(decoder_layers(model)) if taps else ())


def _load_model(
    model: str, directory: Path, config: PreTrainedConfig, dtype: torch.dtype | str, device: torch.device
) -> PreTrainedModel:
    # Checked on the class: a model that ignores the switch would run its own attention, without our cache.
    model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    if not model_class._supports_attention_backend:
        raise Unsupported(f"model {model!r} is of type {config.model_type}, whose attention cannot be replaced")
    settle_cuda()
    register_attention()
    register_probe()
    try:
        with quietly():
            # A pair where loading info is asked for, which its annotation does not know.
            loaded, report = cast(tuple[PreTrainedModel, dict[str, Any]], AutoModelForCausalLM.from_pretrained(
                directory, config=config, dtype=dtype, attn_implementation=PROBE_NAME, output_loading_info=True,
                trust_remote_code=False, ignore_mismatched_sizes=True,
            ))  # fmt: skip
    except Exception as error:  # safetensors and transformers raise many kinds for a damaged checkpoint
        # A class that cannot even be made without weights is not the checkpoint's fault.
        with refusing_failures(config), quietly(), torch.device("meta"):
            AutoModelForCausalLM.from_config(config, attn_implementation=PROBE_NAME)
        raise InvalidRequest(f"model {model!r} cannot be loaded: {first_line(error)}", field="model") from error
    require_all_weights(model, report)
    # The decorator that transformers puts on `to` loses `self`.
    placed: PreTrainedModel = loaded.to(device).eval()  # type: ignore[arg-type]
    return placed
