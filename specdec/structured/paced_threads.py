"""Threads for the work of matchers, divided so that sessions with a slow constraint do not delay the others.

Targets compute masks in them, and coordinators look for forced tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

#: Processor time of one piece of work from which its session is slow.
SLOW_CPU_S = 0.02
#: Threads for quick sessions, and for slow ones.
_NUM_QUICK_THREADS = 4
_NUM_SLOW_THREADS = 2

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class Pace:
    """The pace of one session."""

    is_slow: bool = False
    """True if the last work took long."""
    began_s: float = math.inf
    """Time at which the newest work began, by `time.monotonic`; infinite while it waits for a thread."""


class PacedThreads:
    """Threads for quick sessions and threads for slow ones. They start at the first work."""

    def __init__(self, name: str) -> None:
        """`name` begins the names of the threads."""
        self._quick = ThreadPoolExecutor(_NUM_QUICK_THREADS, thread_name_prefix=name)
        self._slow = ThreadPoolExecutor(_NUM_SLOW_THREADS, thread_name_prefix=f"{name}-slow")

    def submit(self, pace: Pace, work: Callable[..., ResultT], *args: object) -> Future[ResultT]:
        """Run work of a session. A session's work is slow once, and then has the threads for slow sessions."""
        pace.began_s = math.inf
        threads = self._slow if pace.is_slow else self._quick
        return threads.submit(_run, pace, work, *args)

    def close(self) -> None:
        """End the threads once their work is done; work that has not begun is cancelled."""
        for threads in (self._quick, self._slow):
            threads.shutdown(wait=False, cancel_futures=True)


def _run(pace: Pace, work: Callable[..., ResultT], *args: object) -> ResultT:
    pace.began_s, began_cpu_s = time.monotonic(), time.thread_time()
    try:
        return work(*args)
    finally:
        pace.is_slow = time.thread_time() - began_cpu_s > SLOW_CPU_S
