"""Recording of a step over fixed buffers as a CUDA graph, and replay of consecutive draft steps.

A step is a function without arguments that reads and writes the same tensors in every call. `CudaCapture` records the
kernels of one call and returns a function that launches them all at once. A test without a GPU passes another
`Capture`, which calls the step again; everything except the recording is tested that way.

`MultiStepReplay` replays the graph of a step with one row per sequence repeatedly, without reading a result in between.
Between two replays one kernel makes the drawn tokens the graph's input and moves every sequence one position on, using
the block tables on the device. `engine.drafting` draws the tokens. Called by `engine.cuda_graphs.graph_steps`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice
from specdec.engine.cuda_graphs.buckets import MOST_SEQUENCES
from specdec.engine.cuda_graphs.static_inputs import StaticInputs


def last_tokens(slices: Sequence[SequenceSlice]) -> list[SequenceSlice]:
    """Return the slices reduced to their last token."""
    return [
        replace(piece, token_ids=piece.token_ids[-1:], start=piece.start + len(piece.token_ids) - 1) for piece in slices
    ]


class MultiStepReplay:
    """Replays a graph for the tokens that follow a step."""

    def __init__(
        self, inputs: StaticInputs, replay: Callable[[], None], num_sequences: int, scratch_block: int
    ) -> None:
        """
        Args:
            inputs: inputs of a graph with one row per sequence, filled with each sequence's last token.
            replay: launches the graph.
            num_sequences: number of sequences that are not padding.
            scratch_block: block that no sequence has.
        """
        self._inputs = inputs
        self._replay = replay
        self._num_sequences = num_sequences
        self._scratch_block = scratch_block

    def run(self, token_ids: torch.Tensor) -> None:
        """Run the next token of each sequence: int64 [num_sequences] on the device."""
        from specdec.engine.cuda_graphs.draft_kernels import advance

        columns, tables = self._inputs.on_device, self._inputs.tables
        assert tables is not None
        with torch.cuda.device_of(token_ids):
            advance[(1,)](
                token_ids, columns.token_ids, columns.positions, columns.slots, columns.opened_blocks, columns.lengths,
                columns.table_firsts, tables.on_device, self._num_sequences, self._scratch_block,
                PAGE_TOKENS=BLOCK_TOKENS, TILE=MOST_SEQUENCES, num_warps=1,
            )  # fmt: skip
        self._replay()


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
