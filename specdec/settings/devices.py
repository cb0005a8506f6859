"""Checks that the devices of the settings are on this machine, without torch, which takes seconds to import.

`specdec up` and each replica call this before anything is loaded. `specdec.engine.model` checks again with torch, which
may be built for another kind of device.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys

from specdec.contract.errors import InvalidRequest

_NAME = re.compile(r"(?P<kind>cpu|cuda)(:(?P<index>\d{1,4}))?")


def require_device(name: str) -> None:
    """Check a `--device`.

    Raises:
        InvalidRequest: the device is unknown, or not on this machine.
    """
    if name == "auto":
        return
    device = _NAME.fullmatch(name)
    if device is None:
        raise InvalidRequest(f"--device: {name[:64]!r} must be auto, cpu, cuda or cuda:N", field="device")
    if device["kind"] == "cuda" and (count := num_gpus()) is not None and int(device["index"] or 0) >= count:
        raise InvalidRequest(
            f"--device: device {name!r} is not present on this machine, which has {_gpus(count)}", field="device"
        )


def require_gpu_each(name: str, num_ranks: int, *, flag: str) -> None:
    """Check that a `--device` has a GPU for each rank of one replica.

    Raises:
        InvalidRequest: this machine has fewer GPUs than ranks; the message begins with `flag`.
    """
    if name == "cpu" or (count := num_gpus()) is None or (name == "auto" and not count):  # the ranks get the CPU
        return
    if num_ranks > count:
        raise InvalidRequest(
            f"{flag} {num_ranks} needs a GPU for each rank, and this machine has {_gpus(count)}",
            field="tensor_parallel",
        )


def likely_device(name: str) -> str:
    """Return the device that a `--device` selects on this machine: `cpu` if `auto` finds no GPU, else the name."""
    return "cpu" if name == "auto" and num_gpus() == 0 else name


def num_gpus() -> int | None:
    """Return the GPUs that CUDA gives this process (see `CUDA_VISIBLE_DEVICES`); None if only torch can tell."""
    if sys.platform != "linux" or os.path.exists("/dev/kfd"):  # torch calls AMD's GPUs cuda, too
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def _gpus(count: int) -> str:
    return {0: "no GPU", 1: "one GPU"}.get(count, f"{count} GPUs")
