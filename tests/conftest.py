"""Triton's kernels run in its interpreter wherever there is no NVIDIA device, in this process and those it starts."""

from __future__ import annotations

import os
from pathlib import Path

# Before anything imports Triton, which transformers does: what it decorates from then on stays as it is.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
