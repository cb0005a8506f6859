"""Times the calls by which a service counts its metrics, inside the running service.

`python -m bench.suites.observability.calls FOLDER MODULE ARGUMENTS...` runs the service MODULE. It cannot run without
its metrics, so their cost is the time inside these calls; taking the time is part of it. The counts are in
FOLDER/MODULE-PID, and `read_observed` reads them while the service runs. The suite `observability` uses both.
"""

import functools
import mmap
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from specdec.observability.audit import AuditMetrics
from specdec.observability.coordinator_metrics import CoordinatorMetrics
from specdec.observability.engine_metrics import EngineMetrics
from specdec.observability.round_metrics import RoundMetrics

#: Classes whose calls are timed, in a fixed order.
_CLASSES = (CoordinatorMetrics, RoundMetrics, EngineMetrics, AuditMetrics)
_PREFIXES = ("observe_", "request_")
_CELL_BYTES = 8


class Observed(NamedTuple):
    """Calls of one service so far."""

    num_calls: int
    seconds: float

    def since(self, before: "Observed") -> "Observed":
        """Return what was added after `before`."""
        return Observed(self.num_calls - before.num_calls, self.seconds - before.seconds)


class _Stopwatch:
    """The cells of one method: number of calls, nanoseconds. A method is called from one thread."""

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells

    def stop(self, began_ns: int) -> None:
        taken_ns = time.perf_counter_ns() - began_ns
        self._cells[0] += 1
        self._cells[1] += taken_ns


def read_observed(folder: Path) -> dict[str, Observed]:
    """Return the calls so far by module of the service; replicas of one role are added up."""
    totals: dict[str, Observed] = {}
    for path in folder.iterdir():
        module = path.name.rpartition("-")[0]
        cells = memoryview(path.read_bytes()).cast("q")
        before = totals.get(module, Observed(0, 0.0))
        totals[module] = Observed(before.num_calls + sum(cells[::2]), before.seconds + sum(cells[1::2]) / 1e9)
    return totals


def time_calls(path: Path) -> None:
    """Time the calls of this process from now on, and keep the counts in a file."""
    methods = list(_methods())
    size = len(methods) * 2 * _CELL_BYTES
    with path.open("w+b") as file:
        file.truncate(size)
        cells = memoryview(mmap.mmap(file.fileno(), size)).cast("q")
    for index, (owner, name) in enumerate(methods):
        setattr(owner, name, _timed(getattr(owner, name), _Stopwatch(cells[2 * index : 2 * index + 2])))


def _methods() -> Iterator[tuple[type, str]]:
    for owner in _CLASSES:
        yield from ((owner, name) for name in vars(owner) if name.startswith(_PREFIXES))


def _timed(method: Callable[..., None], stopwatch: _Stopwatch) -> Callable[..., None]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> None:
        began_ns = time.perf_counter_ns()
        method(*args, **kwargs)
        stopwatch.stop(began_ns)

    return call


def main() -> None:
    """Run the service that the command line names."""
    folder, module = Path(sys.argv[1]), sys.argv[2]
    time_calls(folder / f"{module}-{os.getpid()}")
    del sys.argv[:2]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
