"""Shows what a command waits for: a spinner in a terminal, elsewhere a line at once and then one every few seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

#: Time between two lines without a terminal.
LINE_INTERVAL_S = 5.0


class Waiting:
    """Shows the text of the last `show` while the context is open."""

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
        """Stop showing. Idempotent."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def show(self, text: str) -> None:
        """Show what the command waits for now, and for how long it has waited. Call this often."""
        now_s = self._clock()
        line = f"{self._what} ({now_s - self._began_s:.0f} s): {text}"
        if self._status is not None:
            from rich.text import Text

            self._status.update(Text(line))  # a path may contain markup characters
        elif self._last_line_s is None or now_s - self._last_line_s >= LINE_INTERVAL_S:
            self._last_line_s = now_s
            with contextlib.suppress(OSError):  # a full disk or a closed pipe must not stop the command
                print(line, file=sys.stderr, flush=True)
