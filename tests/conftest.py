"""Triton's kernels run in its interpreter wherever there is no NVIDIA device, in this process and those it starts.

The garbage collector rests while tests are collected, and later leaves alone what is there by then: modules and tests.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

# Before anything imports Triton, which transformers does: what it decorates from then on stays as it is.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()
