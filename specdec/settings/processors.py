"""The number of processors that this process may use: those of its affinity, within the time its container gets."""

from __future__ import annotations

import math
import os
from pathlib import Path

#: Folder of the mounted control groups.
GROUPS = Path("/sys/fs/cgroup")


def num_processors(groups: Path = GROUPS) -> int:
    """Return the number of processors whose time this process gets, at least 1; a part of one counts as one."""
    quota = cpu_quota(groups)
    num_usable = affine_processors()
    return num_usable if quota is None else max(1, min(num_usable, math.ceil(quota)))


def affine_processors() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(groups: Path = GROUPS) -> float | None:
    """Return how many processors' time a control group grants; None without a limit.

    Args:
        groups: folder of the mounted control groups, of version 2 or 1.
    """
    try:
        if (groups / "cpu.max").exists():
            quota, period = (groups / "cpu.max").read_text().split()
        else:
            quota = (groups / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (groups / "cpu" / "cpu.cfs_period_us").read_text().strip()
        return int(quota) / int(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
