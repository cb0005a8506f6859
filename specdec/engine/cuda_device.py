"""CUDA settings of this process, and how much of a device's memory a KV pool takes by default.

Several processes may share a device and size their pools at the same time. If a share of the memory is given, each
process counts the whole device and what it holds itself, and ignores what is free: the order in which processes start
does not matter. Called by `engine.load_pipeline` and `engine.linear`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from specdec.contract.errors import InvalidRequest

_GIB = 1 << 30
# Share of the KV pool in the memory that is left once the weights are loaded. CUDA graphs keep their working memory.
_KV_SHARE = 0.9
_KV_SHARE_WITH_CUDA_GRAPHS = 0.8


def settle_cuda() -> None:
    """Change PyTorch's CUDA settings to what the engine needs, for the whole process. Idempotent; needs no device."""
    # cuDNN's attention makes a plan for every new length and keeps it: prompt chunks and eager steps always have new
    # lengths.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Partial sums that are rounded to 16 bits depend on how the product was split, and therefore on the batch.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # The environment may enable TF32. Some releases of transformers multiply positions with it, and 11 bits remain.
    torch.backends.cuda.matmul.allow_tf32 = False


def release_freed(device: torch.device) -> None:
    """Give the memory of freed tensors, which PyTorch caches, back to a CUDA device."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory as one process sees it."""

    total_bytes: int
    free_bytes: int
    """Bytes that no process holds."""
    own_bytes: int
    """Bytes that this process holds: the weights, once they are loaded."""

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Measure a CUDA device."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return cls(total_bytes, free_bytes, torch.cuda.memory_reserved(device))


def cuda_pool_bytes(device: torch.device, utilization: float | None, uses_cuda_graphs: bool) -> int:
    """Return the bytes of the KV pool on a CUDA device that holds the weights already; raise as `kv_pool_bytes`."""
    release_freed(device)  # loading and rounding leave freed tensors behind, which would count as held
    kv_share = _KV_SHARE_WITH_CUDA_GRAPHS if uses_cuda_graphs else _KV_SHARE
    return kv_pool_bytes(DeviceMemory.of(device), utilization=utilization, kv_share=kv_share)


def kv_pool_bytes(memory: DeviceMemory, *, utilization: float | None, kv_share: float) -> int:
    """Return the bytes of the KV pool once the weights are loaded.

    Args:
        memory: as it is now.
        utilization: share of the whole device that this process may hold, weights included; None is all that is free.
        kv_share: the pool's share of what is left; the other part is for the working memory of steps.

    Raises:
        InvalidRequest: the share leaves nothing, or other processes hold so much that it is not available.
    """
    if utilization is None:
        return int(memory.free_bytes * kv_share)
    room_bytes = memory.total_bytes * utilization - memory.own_bytes
    if not 0 < room_bytes * kv_share <= memory.free_bytes:
        raise InvalidRequest(
            f"gpu_memory_utilization {utilization:g} of {memory.total_bytes / _GIB:.1f} GiB leaves "
            f"{room_bytes / _GIB:.1f} GiB beside {memory.own_bytes / _GIB:.1f} GiB of weights, and "
            f"{memory.free_bytes / _GIB:.1f} GiB are free; change it, or give kv_cache_bytes",
            field="gpu_memory_utilization",
        )
    return int(room_bytes * kv_share)
