"""The ways in which a worker may run its steps, for what must hold in each: with a device or without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specdec.engine.options import CompileOptions
from tests.support.cuda_graphs_rig import CountedCapture, record_on_tape
from tests.support.interpreted_kernels import cheap_recordings, require_interpreter

#: Captured steps of both attentions are on a tape here, as they are in a graph on a GPU.
WAYS = ("native", "eager", "cuda-graphs", "cuda-graphs, paged")


@contextmanager
def running(way: str) -> Iterator[CompileOptions]:
    """How to load a worker that runs steps of up to five rows in one of `WAYS`, while it is in use."""
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
    """Recorded steps that were run so far."""
    return compiling.capture.num_replays if isinstance(compiling.capture, CountedCapture) else 0
