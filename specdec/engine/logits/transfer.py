"""Copies between host and device in as few transfers as possible.

On an accelerator every copy to the host waits for all earlier work, and so does a copy from pageable host memory.
Reading several tensors together costs one wait. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_host(*tensors: torch.Tensor) -> list[NDArray[Any]]:
    """Return the tensors as arrays of the same shapes and types, in one copy.

    Args:
        tensors: tensors of one device, of float32, float64 or integers below 2^53, which float64 holds exactly.
    """
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    packed = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in tensors]).cpu()
    return unpacked(packed, tensors)


def unpacked(packed: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
    """Return float64 [all entries] as arrays with the shapes and types of `tensors`."""
    parts = packed.split([tensor.numel() for tensor in tensors])
    return [part.to(tensor.dtype).view(tensor.shape).numpy() for part, tensor in zip(parts, tensors, strict=True)]


def to_device(values: Any, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of numbers or nested lists, without waiting for the device."""
    host = torch.from_numpy(np.asarray(values)).to(dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
