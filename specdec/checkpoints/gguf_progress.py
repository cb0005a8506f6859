"""Shows how far the conversion of a GGUF file is: a bar in a terminal, log lines with a bar elsewhere.

`specdec up` shows the last log line of a service that starts. `specdec.checkpoints.gguf` reports the shares that the
converting child prints.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_log = logging.getLogger(__name__)

#: Without a terminal, a line for each tenth.
_NUM_LINES = 10
_BAR_WIDTH = 20


class ConversionProgress:
    """Progress of one conversion while the context is open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_shown = 0
        self._bar = Progress(
            TextColumn(f"converting {path.name}", markup=False), BarColumn(), TextColumn("{task.percentage:.0f} %"),
            TimeElapsedColumn(), console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._task = self._bar.add_task("", total=1.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, share: float) -> None:
        """Show that this share of the conversion is done, 0 to 1."""
        self._bar.update(self._task, completed=share)
        if self._bar.disable and int(share * _NUM_LINES) > self._num_shown:
            self._num_shown = int(share * _NUM_LINES)
            progress = f"{share:.0%}"
            bar = "#" * round(share * _BAR_WIDTH)
            _log.info(
                "converting %s [%s] %s", self._path.name, bar.ljust(_BAR_WIDTH, "-"), progress,
                extra={"progress": progress},
            )  # fmt: skip
