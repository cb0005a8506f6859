"""Load one rank's part of a model and return the rank's worker.

Every rank calls `load_rank` with the same request and comes to the same conclusions: what one rank refuses all refuse,
and the KV pool has as many blocks as the rank with the least memory has room for. The steps of a load are in
`engine.load_pipeline`. Called by `specdec.service.rank`.

A model that is not Llama-shaped is divided by transformers' own tensor parallelism. The process group must exist before
such a model is loaded: without one, transformers gives every rank the whole model, and the logits are still right. So
the loader checks how much a rank holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.checkpoints.rank_checks import FLAG, require_even_heads, require_even_kv_heads, require_supported
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.contract.version import install_command
from specdec.engine.base import Worker
from specdec.engine.cuda_graphs.graph_steps import wants_capture
from specdec.engine.load_pipeline import ModelPart, build_worker
from specdec.engine.model.checkpoint_model import pick_device
from specdec.engine.model.layer_probe import ProbedLayer, refusing_failures
from specdec.engine.model.llama_stack import LlamaStack
from specdec.engine.model.model_runner import ForwardPass, TransformersForward
from specdec.engine.model.text_half import make_whole, read_model
from specdec.engine.options import CUDA_GRAPHS, CompileOptions, LoadRequest
from specdec.engine.parallel.group import RankGroup
from specdec.engine.parallel.leader import LeaderWorker
from specdec.engine.parallel.rank_heartbeat import RankHeartbeat
from specdec.engine.parallel.sharded_llama import ShardedLlama


class TransformersShards:
    """A rank's part of a model that transformers can divide."""

    def __init__(
        self, name: str, directory: Path, config: PreTrainedConfig, dtype: torch.dtype | str, ranks: RankGroup
    ) -> None:
        """Load this rank's part of the weights; the arguments are those of `ShardedLlama`.

        Raises:
            InvalidRequest: the heads cannot be divided, or the weights cannot be read.
            Unsupported: transformers cannot divide a model of this type, or a package for it is missing.
        """
        _require_plan(config, ranks.num_ranks)
        from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]  # lazily exported

        distribution = DistributedConfig(tp_size=ranks.num_ranks)
        self.model = read_model(name, directory, config, dtype, distributed_config=distribution)
        self.num_head_rows = int(self.model.get_output_embeddings().weight.shape[0])

    def hold_in_int8(self) -> None:
        """Raise Unsupported: transformers' parts cannot be rounded as the whole weights would be."""
        raise Unsupported(f"{FLAG} does not divide int8 weights of a model of type {self.model.config.model_type}",
                          field="dtype")  # fmt: skip

    def forward_pass(self, compiling: CompileOptions, *, is_int8: bool) -> ForwardPass:
        """Return transformers' own forward pass; every rank gets all logits."""
        return TransformersForward(self.model)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Change nothing: the model's own forward pass computes the whole model's logits."""
        yield


def _require_plan(config: PreTrainedConfig, num_ranks: int) -> None:
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise Unsupported(
            f"{FLAG}: transformers cannot divide a model of type {config.model_type}",
            field="tensor_parallel",
        )
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    require_even_heads(heads, num_ranks)
    require_even_kv_heads(kv_heads, num_ranks, may_share=False)
    if find_spec("accelerate") is None:
        raise Unsupported(
            f"{FLAG} for a model of type {config.model_type} needs the package accelerate, which is not installed: run "
            f"{install_command('gguf')}",
            field="tensor_parallel",
        )


_log = logging.getLogger(__name__)


def rank_device(name: str, local_rank: int) -> torch.device:
    """Return the device of one of several ranks: a GPU of its own, or the CPU.

    Args:
        name: value of `--device`.
        local_rank: index of the rank among those of this machine.

    Raises:
        InvalidRequest: the machine has no such device, or fewer GPUs than ranks.
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


def load_rank(request: LoadRequest, ranks: RankGroup, rank_heartbeat: RankHeartbeat) -> Worker:
    """Load this rank's part; return, on the first rank, the worker that leads the others, which must then follow.

    Raises:
        InvalidRequest: as `build_worker`, or the model's heads cannot be divided among the ranks.
        Unsupported: as `build_worker`, or several ranks do not support the model, its files or a setting.
    """
    return build_worker(ShardedModel(ranks, rank_heartbeat), request)


class _Shards(Protocol):
    """A rank's part of a model."""

    model: PreTrainedModel
    num_head_rows: int

    def hold_in_int8(self) -> None: ...

    def forward_pass(self, compiling: CompileOptions, *, is_int8: bool) -> ForwardPass: ...

    def joined(self) -> AbstractContextManager[None]: ...


class ShardedModel(ModelPart):
    """Implements `engine.load_pipeline.ModelPart` by the part of a model that one rank of a group holds."""

    _shards: _Shards
    _whole: PreTrainedModel
    """The whole model on the meta device, without weights."""

    def __init__(self, ranks: RankGroup, rank_heartbeat: RankHeartbeat) -> None:
        self._ranks, self._heartbeat = ranks, rank_heartbeat
        self._load_s = 0.0
        self.device, self.is_first, self.all_agree = ranks.device, ranks.is_first, ranks.all_agree
        self.kv_part = f"tp{ranks.num_ranks}.{ranks.rank}"

    @property
    def num_head_rows(self) -> int:
        return self._shards.num_head_rows

    def require_settings(self, request: LoadRequest) -> None:
        options = request.compiling
        require_supported(
            device="cuda" if options.can_record(self.device) else "cpu", dtype=request.dtype,
            compile_backend=options.backend, deterministic=options.is_deterministic,
        )  # fmt: skip
        if request.local_drafts:
            raise Unsupported(f"{FLAG} does not divide local drafts", field="local_draft")

    def wants_cuda_graphs(self, options: CompileOptions) -> bool:
        # `auto` runs eager steps: CUDA graphs of several ranks have not been measured on two GPUs yet.
        is_requested = options.backend == CUDA_GRAPHS or options.is_deterministic
        return is_requested and wants_capture(options, self.device)

    def load(self, request: LoadRequest, directory: Path, config: PreTrainedConfig, dtype: torch.dtype | str) -> None:
        """Load this rank's part, and wait until every rank has loaded its own."""
        if getattr(config, "quantization_config", None) is not None:
            raise Unsupported(
                f"{FLAG} does not divide quantised weights, and model {request.model!r} has them",
                field="tensor_parallel",
            )
        began_s = time.monotonic()
        with refusing_failures(config):
            self._whole = make_whole(config)
        if LlamaStack.fits(self._whole):
            self._shards = ShardedLlama(request.model, directory, self._whole, dtype, self._ranks)
        else:
            self._shards = TransformersShards(request.model, directory, config, dtype, self._ranks)
        self.model = self._shards.model
        self._load_s = time.monotonic() - began_s
        self._ranks.barrier("loaded")

    def require_own_share(self, layers: list[ProbedLayer]) -> None:
        """Refuse a model of which this rank holds all: the logits would be right, and no memory would be saved."""
        all_numbers = sum(parameter.numel() for parameter in self._whole.parameters())
        own_numbers = sum(_local(parameter).numel() for parameter in self.model.parameters())
        text = self._whole.config.get_text_config()
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        own_kv_heads = max(layer.shape.num_kv_heads for layer in layers)
        if own_numbers >= all_numbers or own_kv_heads > max(1, kv_heads // self._ranks.num_ranks):
            raise Unsupported(
                f"{FLAG}: transformers' plan does not divide a model of type {self._whole.config.model_type} (a rank "
                f"holds {own_numbers} of {all_numbers} parameters and {own_kv_heads} of {kv_heads} KV heads); use 1",
                field="tensor_parallel",
            )
        _log.info(
            "loaded part %d of %d in %.1f s: %.0f %% of the parameters, %d of %d KV heads", self._ranks.rank + 1,
            self._ranks.num_ranks, self._load_s, 100 * own_numbers / all_numbers, own_kv_heads, kv_heads,
            extra={"parameter_share": own_numbers / all_numbers, "kv_share": own_kv_heads / kv_heads},
        )  # fmt: skip

    def hold_in_int8(self) -> None:
        self._shards.hold_in_int8()

    def agree_on_blocks(self, count: Callable[[], int]) -> int:
        own_blocks, failure = 0, None
        try:
            own_blocks = count()
        except InvalidRequest as error:
            failure = error  # the other ranks must learn of it first
        num_blocks = self._ranks.smallest(own_blocks)
        if failure is not None:
            raise failure
        if num_blocks < 1:
            raise InvalidRequest("the KV pool of another rank has no room for one block", field="kv_cache_bytes")
        return num_blocks

    def joined(self) -> AbstractContextManager[None]:
        return self._shards.joined()

    def forward_pass(self, request: LoadRequest, *, taps: bool) -> ForwardPass:
        return self._shards.forward_pass(request.compiling, is_int8=request.is_int8)

    def lead(self, own: Worker) -> Worker:
        self._ranks.barrier("ready")
        return LeaderWorker(own, self._ranks, self._heartbeat) if self.is_first else own


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, which transformers may have divided."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()
