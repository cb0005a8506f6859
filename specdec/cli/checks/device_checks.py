"""Checks of this machine: processors and memory that it gives this process, and its GPUs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from specdec.cli.checks.finding import Finding, fail, ok, warn
from specdec.cli.extras import missing_modules
from specdec.settings.processors import GROUPS, affine_processors, cpu_quota

_TORCH_LIMIT_S = 90.0
#: Free memory below which not even the demo models start.
_MIN_FREE_BYTES = 1 << 30

#: Run in another process, because the import of torch takes seconds and its drivers may hang.
_LIST_GPUS = """
import json, torch
cuda = torch.cuda
found = [(cuda.get_device_properties(index), cuda.mem_get_info(index)[0]) for index in range(cuda.device_count())]
devices = [[each.name, each.total_memory, free, each.major] for each, free in found]
print(json.dumps({"cuda": torch.version.cuda, "is_available": cuda.is_available(), "devices": devices}))
"""


def check_processors() -> Iterator[Finding]:
    """Compare the processors that this process may use with those whose time it gets."""
    num_usable = affine_processors()
    found = f"{num_usable} of {os.cpu_count() or 1} usable"
    quota = cpu_quota()
    if quota is not None and math.ceil(quota) < num_usable:
        threads = max(1, int(quota))
        yield warn("processors", f"{found}, but this container gets the time of {quota:g}, so that threads wait",
                   f"give replicas --num-threads {threads}, or the container as many processors")  # fmt: skip
    else:
        yield ok("processors", found)


def check_memory() -> Iterator[Finding]:
    """Compare free memory, within the limit of the control group, with what a replica needs at least."""
    free, limit = _free_bytes(), _group_limit_bytes(GROUPS)
    if free is None:
        return
    found = f"{free / 1e9:.1f} GB free" + (f", limited to {limit / 1e9:.1f} GB by the container" if limit else "")
    if min(free, limit or free) < _MIN_FREE_BYTES:
        yield warn("memory", found, "end other programs or raise the limit; a replica needs its weights and KV cache")
    else:
        yield ok("memory", found)


def _free_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _group_limit_bytes(groups: Path) -> int | None:
    for path in (groups / "memory.max", groups / "memory" / "memory.limit_in_bytes"):
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):  # absent, or "max"
            continue
        return limit if limit < 1 << 60 else None  # version 1 states a huge number without a limit
    return None


def check_gpus() -> Iterator[Finding]:
    """Check that torch can use the NVIDIA devices of this machine."""
    if missing_modules()["serve"]:
        return
    if not Path("/dev/nvidiactl").exists():
        yield ok("gpu", "no NVIDIA device; models run on the CPU")
        return
    try:
        done = subprocess.run([sys.executable, "-c", _LIST_GPUS], capture_output=True, text=True, errors="replace",
                              timeout=_TORCH_LIMIT_S, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        yield fail("gpu", f"torch has not listed the devices within {_TORCH_LIMIT_S:g} s",
                   "look at nvidia-smi and at the kernel's log; the driver may hang")  # fmt: skip
        return
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield fail("gpu", f"torch cannot use the devices: {reason}", "look at nvidia-smi")
        return
    listed = json.loads(done.stdout)
    if listed["cuda"] is None:
        yield warn("gpu", "an NVIDIA device is there, but this torch is built for CPUs", "install a torch with CUDA")
    elif not listed["is_available"]:
        yield fail("gpu", f"torch finds no device for CUDA {listed['cuda']}",
                   "install a driver that is new enough, or give the container its devices")  # fmt: skip
    for index, (name, total, free, major) in enumerate(listed["devices"]):
        found = f"cuda:{index} {name}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
        if major < 8:
            yield warn("gpu", f"{found}; bfloat16 is emulated", "use --dtype float16, or a GPU of 2020 or later")
        else:
            yield ok("gpu", found)
