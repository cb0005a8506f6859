"""Show the progress of a long start: a progress bar in a terminal, a log line for each part elsewhere.

Called by `engine.torch_compile`, `engine.cuda_graphs.graph_steps` and `specdec.service.replica_main`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

_log = logging.getLogger(__name__)

PartT = TypeVar("PartT")

#: A load gets a log line for each tenth once it has taken this long.
_QUICK_LOAD_S = 5.0
_NUM_LINES = 10


def shown(parts: Sequence[PartT], title: str, describe: Callable[[PartT], str]) -> Iterator[PartT]:
    """Yield `parts` and report each one before it is yielded."""
    if sys.stderr.isatty():
        yield from track(parts, title, console=Console(file=sys.stderr), transient=True)
        return
    for index, part in enumerate(parts):
        progress = f"{index + 1}/{len(parts)}"
        _log.info("%s %s (%s)", title, progress, describe(part), extra={"progress": progress})
        yield part


def logging_shares(
    note: Callable[[float], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[float], None]:
    """Return a function that hands on the share of the weights that are loaded, and logs each tenth of a long load."""
    began_s = num_shown = 0.0

    def note_share(share: float) -> None:
        nonlocal began_s, num_shown
        began_s = began_s or clock()
        note(share)
        if share < 1.0 and clock() - began_s >= _QUICK_LOAD_S and int(share * _NUM_LINES) > num_shown:
            num_shown = int(share * _NUM_LINES)
            progress = f"{share:.0%}"
            _log.info("loading weights: %s", progress, extra={"progress": progress})

    return note_share
