"""Triton's kernels run in its interpreter wherever there is no NVIDIA device, in this process and those it starts.

Native kernels are compiled once for all processes of a run, and of the next ones.

The garbage collector rests while tests are collected, and later leaves alone what is there by then: modules and tests.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.kept_compiler import keep_compilations

# Before anything imports Triton, which transformers does: what it decorates from then on stays as it is.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No example has a deadline: a machine with other work may be slow at any moment.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

keep_compilations(Path(sys.prefix) / "compiled")
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()
