"""Ends a process on SIGTERM until it handles signals itself. The services' `__main__` call it before other imports."""

from __future__ import annotations

import os
import signal
from types import FrameType


def end_on_sigterm() -> None:
    """End this process at once on SIGTERM, also as the first process of a container.

    The kernel has no default action for the first process of a container: without a handler the signal is dropped.
    `specdec.service.lifecycle.stop_on_signals` replaces this handler.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
