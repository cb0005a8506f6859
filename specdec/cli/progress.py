"""Shows what a command waits for: a spinner in a terminal, elsewhere a line for each change."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

#: Least time between two lines without a terminal, for texts that change with every step.
LINE_INTERVAL_S = 5.0


class Waiting:
    """Shows the text of the last `show` while the context is open."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, what: str = "starting") -> None:
        self._clock = clock
        self._what = what
        self._began_s = clock()
        self._last_line, self._last_line_s = "", float("-inf")
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

    def show(self, text: str, *, line: str | None = None) -> None:
        """Show what the command waits for now, and for how long it has waited. Call this often.

        Args:
            text: what is shown in a terminal.
            line: what is shown elsewhere, if that is not `text`; "" for nothing new.
        """
        now_s = self._clock()
        waited = f"{self._what} ({now_s - self._began_s:.0f} s)"
        line = text if line is None else line
        if self._status is not None:
            from rich.text import Text

            self._status.update(Text(f"{waited}: {text}"))  # a path may contain markup characters
        elif line and line != self._last_line and now_s - self._last_line_s >= LINE_INTERVAL_S:
            self._last_line, self._last_line_s = line, now_s
            with contextlib.suppress(OSError):  # a full disk or a closed pipe must not stop the command
                print(f"{waited}: {line}", file=sys.stderr, flush=True)


class LastMessage(logging.Handler):
    """Holds the last record of a logger while the context is open: a conversion's progress, or a download."""

    def __init__(self, logger: str) -> None:
        super().__init__()
        self._logger = logging.getLogger(logger)
        self._level_before = self._logger.level
        self.text = ""
        """The last message; "" before the first."""

    def __enter__(self) -> Self:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level_before)

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
