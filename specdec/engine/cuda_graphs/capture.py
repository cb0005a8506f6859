"""How a step over fixed buffers becomes something that can be run again at once: the seam to CUDA graphs.

A step is a function without arguments that reads and writes the same tensors whenever it runs. On a CUDA device it is
recorded and its kernels are then launched together; anything that calls the step again means the same, which is how all
but the recording is proven where there is no device. Not here: what a step computes. Called by
`engine.cuda_graphs.steps`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

# The first run loads kernels and chooses among them, and libraries allocate what they keep; none of it may be recorded.
_WARM_UP_RUNS = 2


class CudaCapture:
    """Records steps as CUDA graphs, which share one memory pool: never run two at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """Runs the step, then records it. What it allocates belongs to the pool and is used again by other steps.

        Raises:
            RuntimeError: the step did what cannot be recorded, a copy to the host for one, or ran out of memory.
        """
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # The stream is set outside as well: a recording that fails does not set the former one again.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                step()
            # Another worker's recording, collected meanwhile, would end this one: `CUDAGraph::reset` has no guard.
            collects = gc.isenabled()
            gc.disable()
            failure: Exception | None = None
            try:
                # Other threads may go on using the device.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    try:
                        step()
                    except Exception as error:
                        failure = error
                        raise
            except BaseException:
                self._end_recording()
                if failure is not None:
                    raise failure from None  # ending a recording that has failed fails as well, and says less
                raise
            finally:
                failure = None  # or else its frames, and what the step allocated, live until they are collected
                if collects:
                    gc.enable()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay

    def _end_recording(self) -> None:
        """A recording that cannot be ended leaves PyTorch's allocator in it: nothing more could be recorded into the
        pool, and no memory of the process were ever given back."""
        try:
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        except RuntimeError:  # it was ended: the step ran out of memory, say
            return
        self._pool = torch.cuda.graph_pool_handle()
