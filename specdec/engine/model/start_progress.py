"""Show the progress of a long start: a progress bar in a terminal, a log line for each part elsewhere.

Called by `engine.torch_compile` and `engine.cuda_graphs.steps`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

_log = logging.getLogger(__name__)

PartT = TypeVar("PartT")


def shown(parts: Sequence[PartT], title: str, describe: Callable[[PartT], str]) -> Iterator[PartT]:
    """Yield `parts` and report each one before it is yielded."""
    if sys.stderr.isatty():
        yield from track(parts, title, console=Console(file=sys.stderr), transient=True)
        return
    for index, part in enumerate(parts):
        progress = f"{index + 1}/{len(parts)}"
        _log.info("%s %s (%s)", title, progress, describe(part), extra={"progress": progress})
        yield part
