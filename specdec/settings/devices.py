"""Whether the devices that settings name are on this machine, without torch, which takes seconds to import.

Not the last word: torch may have been built for another device than the machine's (`specdec.engine.model`). Called by
`specdec up` and where a replica starts, before anything is loaded.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys

from specdec.errors import InvalidRequest

_NAME = re.compile(r"(?P<kind>cpu|cuda)(:(?P<index>\d{1,4}))?")


def require_device(name: str) -> None:
    """Looks at a `--device`.

    Raises:
        InvalidRequest: it is unknown, or not here.
    """
    if name == "auto":
        return
    device = _NAME.fullmatch(name)
    if device is None:
        raise InvalidRequest(f"--device: {name[:64]!r} is none of auto, cpu, cuda and cuda:N", field="device")
    if device["kind"] == "cuda" and (count := num_gpus()) is not None and int(device["index"] or 0) >= count:
        raise InvalidRequest(
            f"--device: device {name!r} is not present on this machine, which has {_gpus(count)}", field="device"
        )


def require_gpu_each(name: str, num_ranks: int, *, flag: str) -> None:
    """Looks at a `--device` that is here and that ranks of one replica are to share out: a GPU each.

    Raises:
        InvalidRequest: there are fewer GPUs than ranks; the message begins with `flag`.
    """
    if name == "cpu" or (count := num_gpus()) is None or (name == "auto" and not count):  # the ranks get the CPU
        return
    if num_ranks > count:
        raise InvalidRequest(
            f"{flag} {num_ranks} needs a GPU for each rank, and this machine has {_gpus(count)}",
            field="tensor_parallel",
        )


def likely_device(name: str) -> str:
    """What a `--device` comes to on this machine, as far as can be told: `cpu` where `auto` finds no GPU."""
    return "cpu" if name == "auto" and num_gpus() == 0 else name


def num_gpus() -> int | None:
    """GPUs that CUDA gives this process, `CUDA_VISIBLE_DEVICES` obeyed; None where only torch can tell."""
    if sys.platform != "linux" or os.path.exists("/dev/kfd"):  # torch calls AMD's cuda, too
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
