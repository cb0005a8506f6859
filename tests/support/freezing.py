"""Processes that are stopped as they are, connections and all, and go on afterwards. For tests of hung parts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.stack import Stack


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process stands still within."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def frozen_part(stack: Stack, name: str) -> Iterator[None]:
    """A part of a stack stands still within."""
    process = stack.parts[name].process
    assert process is not None
    with frozen(process.pid):
        yield
