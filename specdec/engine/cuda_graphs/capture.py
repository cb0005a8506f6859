"""Recording of a step over fixed buffers as a CUDA graph.

A step is a function without arguments that reads and writes the same tensors in every call. `CudaCapture` records the
kernels of one call and returns a function that launches them all at once. A test without a GPU passes another
`Capture`, which calls the step again; everything except the recording is tested that way. Called by
`engine.cuda_graphs.graph_steps`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

# The first calls load kernels, choose among them and allocate the workspaces of libraries. None of it may be recorded.
_WARM_UP_RUNS = 2


class CudaCapture:
    """Records steps as CUDA graphs. They share one memory pool, so no two of them may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """Run the step, then record it. Its allocations go to the pool, where later steps reuse the memory.

        Raises:
            RuntimeError: the step used an operation that cannot be recorded, such as a copy to the host, or ran out of
                memory.
        """
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # The stream is also set here because a recording that fails does not restore the previous stream.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                step()
            # If the garbage collector freed another worker's graph meanwhile, `CUDAGraph::reset` would end this
            # recording.
            collects = gc.isenabled()
            gc.disable()
            failure: Exception | None = None
            try:
                # "thread_local": other threads may use the device meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    try:
                        step()
                    except Exception as error:
                        failure = error
                        raise
            except BaseException:
                self._end_recording()
                if failure is not None:
                    raise failure from None  # the error of ending a failed recording says less
                raise
            finally:
                failure = None  # its frames would keep the step's tensors alive until the next garbage collection
                if collects:
                    gc.enable()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay

    def _end_recording(self) -> None:
        """End the allocator's recording after a failure.

        Otherwise PyTorch's allocator would stay in recording mode: the pool could not be used again, and the process
        would never return memory to the device.
        """
        try:
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        except RuntimeError:  # the recording was ended already, for example because the step ran out of memory
            return
        self._pool = torch.cuda.graph_pool_handle()
