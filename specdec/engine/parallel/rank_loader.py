"""Turns a checkpoint into one rank's worker: what `engine.loader` does, for a part of a model.

Every rank calls this with the same arguments and comes to the same conclusions: what one refuses all refuse, and the KV
pool has the blocks that the rank with the least room has. Not here: the ranks' processes (`specdec.service.rank`).
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import PreTrainedModel

from specdec.checkpoints.locate import locate_checkpoint
from specdec.checkpoints.rank_checks import FLAG, require_supported
from specdec.checkpoints.vocabulary import load_vocabulary
from specdec.engine.base import KvLayout, ModelShape, Worker
from specdec.engine.cuda_graphs.steps import capture_steps, wants_capture
from specdec.engine.cuda_settings import settle_cuda
from specdec.engine.linear.row_products import require_kernel
from specdec.engine.model.attention import ATTENTION_NAME, register_attention
from specdec.engine.model.batch_invariance import FIELD, require_batch_invariance, require_keepable
from specdec.engine.model.checkpoint_model import (
    load_config,
    model_context,
    model_shape,
    pick_device,
    pick_dtype,
    pool_blocks,
)
from specdec.engine.model.device_memory import cuda_pool_bytes
from specdec.engine.model.graph_source import GraphSource
from specdec.engine.model.kv_cache import KvCache, LayerShape, block_bytes
from specdec.engine.model.layer_probe import ProbedLayer, probe_layers, refusing_failures, register_probe
from specdec.engine.model.llama_stack import LlamaStack
from specdec.engine.model.model_runner import ForwardPass, ModelRunner
from specdec.engine.model.self_check import Arithmetic, Reference, require_same, take_reference
from specdec.engine.options import CUDA_GRAPHS, CompileOptions
from specdec.engine.parallel.group import RankGroup
from specdec.engine.parallel.leader import LeaderWorker
from specdec.engine.parallel.rank_heartbeat import RankHeartbeat
from specdec.engine.parallel.sharded_llama import ShardedLlama, make_whole
from specdec.engine.parallel.transformers_shards import TransformersShards
from specdec.errors import InvalidRequest, Unsupported
from specdec.types import BLOCK_TOKENS

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """What every rank loads; the fields are `engine.loader.load_worker`'s, the KV pool being each rank's own."""

    model: str
    device: str
    dtype: str
    compiling: CompileOptions = field(default_factory=CompileOptions)
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    num_kv_blocks: int | None = None
    max_context_tokens: int | None = None
    num_threads: int | None = None
    self_check: bool = True


class _Shards(Protocol):
    """A rank's part of a model."""

    model: PreTrainedModel
    num_head_rows: int

    def hold_in_int8(self) -> None: ...

    def forward_pass(self, compiling: CompileOptions, *, is_int8: bool) -> ForwardPass: ...

    def joined(self) -> AbstractContextManager[None]: ...


def rank_device(name: str, local_rank: int) -> torch.device:
    """Where one of several ranks runs: on its own GPU, or on the CPU.

    Args:
        name: as `--device` has it.
        local_rank: which of the ranks on this machine.

    Raises:
        InvalidRequest: there are fewer GPUs than ranks, or none such.
    """
    device = pick_device(name)
    if device.type == "cpu":
        return device
    if local_rank >= torch.cuda.device_count():
        raise InvalidRequest(
            f"{FLAG} needs a GPU for each rank on a machine, and this one has {torch.cuda.device_count()}",
            field="tensor_parallel",
        )
    return torch.device("cuda", local_rank)


def load_rank(wanted: RankModel, ranks: RankGroup, rank_heartbeat: RankHeartbeat) -> Worker:
    """Loads this rank's part; on the first rank the worker that leads the others, who must follow by then.

    Raises:
        InvalidRequest: as `load_worker`, or the model's heads do not divide among the ranks.
        Unsupported: as `load_worker`, or the model, its files or a setting are not for several ranks.
    """
    compiling, is_int8 = wanted.compiling, wanted.dtype == "int8"
    may_record = ranks.device.type == "cuda" or compiling.capture is not None
    require_supported(device="cuda" if may_record else "cpu", dtype=wanted.dtype, compile_backend=compiling.backend,
                      deterministic=compiling.is_deterministic)  # fmt: skip
    # Whoever says nothing gets eager steps: no machine with two GPUs has recorded any yet.
    is_asked_for = compiling.backend == CUDA_GRAPHS or compiling.is_deterministic
    uses_cuda_graphs = is_asked_for and wants_capture(compiling, ranks.device)
    if compiling.is_deterministic:
        require_keepable(compiling, ranks.device, is_native=False, uses_cuda_graphs=uses_cuda_graphs)
    if compiling.multiplies_rows(ranks.device, is_int8=is_int8):
        require_kernel(FIELD if compiling.is_deterministic else "dtype")
    directory = locate_checkpoint(wanted.model)
    if wanted.num_threads is not None:
        torch.set_num_threads(wanted.num_threads)
    config = load_config(wanted.model, directory)
    if getattr(config, "quantization_config", None) is not None:
        raise Unsupported(f"{FLAG}: model {wanted.model!r} is quantised, and is not divided", field="tensor_parallel")
    token_to_id = load_vocabulary(directory)
    settle_cuda()
    register_attention()
    register_probe()
    began_s = time.monotonic()
    dtype = pick_dtype(wanted.dtype, ranks.device, getattr(config, "dtype", None))
    with refusing_failures(config):
        whole = make_whole(config)
    shards: _Shards
    if LlamaStack.fits(whole):
        shards = ShardedLlama(wanted.model, directory, whole, dtype, ranks)
    else:
        shards = TransformersShards(wanted.model, directory, config, dtype, ranks)
    context = min(model_context(config), wanted.max_context_tokens or sys.maxsize)
    ranks.barrier("loaded")
    with refusing_failures(config):
        layers = probe_layers(shards.model)
        shapes, kinds = [layer.shape for layer in layers], [layer.kind for layer in layers]
        _require_part(shards, whole, layers, ranks, time.monotonic() - began_s)
        if is_int8:
            shards.hold_in_int8()  # before anybody asks how much memory is left
        num_blocks = _agree_on_blocks(
            wanted, shapes, shards.model.dtype, context, ranks, uses_cuda_graphs=uses_cuda_graphs
        )
        layout = KvLayout(
            str(shards.model.dtype).removeprefix("torch."),
            tuple(block_bytes([shape], shards.model.dtype) for shape in shapes),
            rank=f"tp{ranks.num_ranks}.{ranks.rank}",
        )
        shape = model_shape(
            shards.model, directory, token_to_id, num_blocks, context, ranks.device, layout,
            num_head_rows=shards.num_head_rows, is_int8=is_int8,
        )  # fmt: skip
        if wanted.self_check and ranks.is_first:
            _log.info("self-check: comparing with the model's own forward pass")
        reference = _reference(shards, shape, layers) if wanted.self_check else None
        shards.model.set_attn_implementation(ATTENTION_NAME)
        # The last block is the captured steps' own: what they store of padding.
        cache = KvCache(shapes, num_blocks=num_blocks + uses_cuda_graphs, dtype=shards.model.dtype, device=ranks.device)
        source = GraphSource(shards.model, kinds, cache)
        forward = shards.forward_pass(compiling, is_int8=is_int8)
        recorded = capture_steps(compiling, source, forward, shape, ranks.all_agree) if uses_cuda_graphs else {}
        own = ModelRunner(forward, cache, kinds, shape, dtype=shards.model.dtype, device=ranks.device,
                          recorded=recorded)  # fmt: skip
    ranks.barrier("ready")
    if not ranks.is_first:
        return own
    lead = LeaderWorker(own, ranks, rank_heartbeat)
    try:
        if reference is not None:
            require_same(lead, reference, config.model_type)
            _log.info("self-check passed")
        if compiling.is_deterministic:
            require_batch_invariance(lead)
    except BaseException:
        lead.close()
        raise
    return lead


def _require_part(
    shards: _Shards, whole: PreTrainedModel, layers: list[ProbedLayer], ranks: RankGroup, seconds: float
) -> None:
    """Refuses to serve where a rank holds more than its part: parity would pass, and nothing be gained."""
    all_numbers = sum(parameter.numel() for parameter in whole.parameters())
    own_numbers = sum(_local(parameter).numel() for parameter in shards.model.parameters())
    text = whole.config.get_text_config()
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    own_kv_heads = max(layer.shape.num_kv_heads for layer in layers)
    if own_numbers >= all_numbers or own_kv_heads > max(1, kv_heads // ranks.num_ranks):
        raise Unsupported(
            f"{FLAG}: a rank holds {own_numbers} of the {all_numbers} numbers of a model of type "
            f"{whole.config.model_type}, and {own_kv_heads} of its {kv_heads} KV heads: it was not divided",
            field="tensor_parallel",
        )
    _log.info(
        "loaded part %d of %d in %.1f s: %.0f %% of the parameters, %d of %d KV heads", ranks.rank + 1,
        ranks.num_ranks, seconds, 100 * own_numbers / all_numbers, own_kv_heads, kv_heads,
        extra={"parameter_share": own_numbers / all_numbers, "kv_share": own_kv_heads / kv_heads},
    )  # fmt: skip


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Of a tensor that transformers has divided, this rank's part."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


def _agree_on_blocks(
    wanted: RankModel,
    shapes: list[LayerShape],
    dtype: torch.dtype,
    context: int,
    ranks: RankGroup,
    *,
    uses_cuda_graphs: bool,
) -> int:
    """Blocks that every rank has room for."""
    bytes_per_block = block_bytes(shapes, dtype)
    own_bytes = wanted.kv_cache_bytes
    try:
        if own_bytes is None and wanted.num_kv_blocks is None and ranks.device.type == "cuda":
            own_bytes = cuda_pool_bytes(ranks.device, wanted.gpu_memory_utilization, uses_cuda_graphs)
        own_blocks, failure = pool_blocks(bytes_per_block, context, own_bytes, wanted.num_kv_blocks), None
    except InvalidRequest as error:  # the others must hear of it
        own_blocks, failure = 0, error
    num_blocks = ranks.smallest(own_blocks)
    if failure is not None:
        raise failure
    if num_blocks < 1:
        raise InvalidRequest("the KV pool of another rank has no room for one block", field="kv_cache_bytes")
    if ranks.is_first:
        _log.info("KV cache of %d blocks: %d tokens in all", num_blocks, num_blocks * BLOCK_TOKENS)
    return num_blocks


def _reference(shards: _Shards, shape: ModelShape, layers: list[ProbedLayer]) -> Reference:
    """What transformers' own modules give, on all ranks together."""
    with shards.joined():
        kinds = [layer.kind for layer in layers]
        return take_reference(shards.model, shape, kinds, Arithmetic(torch.finfo(shards.model.dtype).eps))
