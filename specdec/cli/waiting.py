"""What a command shows while it waits: a spinner in a terminal, elsewhere a line at once and then every few seconds.

Not here: what it waits for. Called by `up` and `scale`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

#: Without a terminal, seconds between two lines.
LINE_INTERVAL_S = 5.0


class Waiting:
    """Shows, while the context is open, the text it was last given."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, what: str = "starting") -> None:
        self._clock = clock
        self._what = what
        self._began_s = clock()
        self._last_line_s: float | None = None
        self._status: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status(f"{self._what} …")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Shows nothing any more. Idempotent."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def show(self, text: str) -> None:
        """To be called often: says what is waited for now, and for how long it has been."""
        now_s = self._clock()
        line = f"{self._what} ({now_s - self._began_s:.0f} s): {text}"
        if self._status is not None:
            from rich.text import Text

            self._status.update(Text(line))  # a model's path is no markup
        elif self._last_line_s is None or now_s - self._last_line_s >= LINE_INTERVAL_S:
            self._last_line_s = now_s
            with contextlib.suppress(OSError):  # a full disk, or a reader who left, keeps nothing from starting
                print(line, file=sys.stderr, flush=True)
