"""The implementations of a worker's steps, for tests of properties that must hold in each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specdec.engine.options import CompileOptions
from tests.support.cuda_graphs_rig import CountedCapture, record_on_tape
from tests.support.interpreted_kernels import cheap_recordings, require_interpreter

#: Steps with CUDA graphs, with either attention, are replayed from a tape here.
WAYS = ("native", "eager", "cuda-graphs", "cuda-graphs, paged")


@contextmanager
def running(way: str) -> Iterator[CompileOptions]:
    """Yield the options of a worker that runs steps of up to five rows in one of `WAYS`."""
    if not way.startswith("cuda-graphs"):
        yield CompileOptions(way)
        return
    attention = None
    if way.endswith("paged"):
        require_interpreter()
        attention = "paged"
    with cheap_recordings():
        yield CompileOptions("cuda-graphs", (1, 5), capture=CountedCapture(record_on_tape), attention=attention)


def num_replays(compiling: CompileOptions) -> int:
    """Return the number of replays so far."""
    return compiling.capture.num_replays if isinstance(compiling.capture, CountedCapture) else 0
