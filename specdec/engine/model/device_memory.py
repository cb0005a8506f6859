"""How much of a CUDA device's memory a KV pool takes by default.

Several processes may share a device and size their pools at the same time. With a share given, each counts the whole
device and what it holds itself, never what happens to be free: the order of their starts does not matter. Called by
`engine.loader` and `engine.parallel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from specdec.engine.cuda_settings import release_freed
from specdec.errors import InvalidRequest

_GIB = 1 << 30
# What a KV pool takes of the memory that is left to it once the weights are loaded: captured steps keep their working
# memory for good.
_KV_SHARE = 0.9
_KV_SHARE_CAPTURED = 0.8


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory as one process sees it."""

    total_bytes: int
    free_bytes: int
    """That no process holds."""
    own_bytes: int
    """That this process holds: the weights, once they are loaded."""

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Asks a CUDA device."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return cls(total_bytes, free_bytes, torch.cuda.memory_reserved(device))


def cuda_pool_bytes(device: torch.device, utilization: float | None, uses_cuda_graphs: bool) -> int:
    """Bytes for the KV pool on a CUDA device that holds the weights already; raises as `kv_pool_bytes` does."""
    release_freed(device)  # loading and rounding leave behind what nobody uses, and it would count as held
    kv_share = _KV_SHARE_CAPTURED if uses_cuda_graphs else _KV_SHARE
    return kv_pool_bytes(DeviceMemory.of(device), utilization=utilization, kv_share=kv_share)


def kv_pool_bytes(memory: DeviceMemory, *, utilization: float | None, kv_share: float) -> int:
    """Bytes for the KV pool once the weights are loaded.

    Args:
        memory: as of now.
        utilization: share of the whole device that this process may hold, weights included; None: all that is free.
        kv_share: the pool's share of what is left for it; the rest is for what steps work with.

    Raises:
        InvalidRequest: the share leaves nothing, or others hold so much that it cannot be had.
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
