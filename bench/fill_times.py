"""`python -m bench.fill_times`: time of the host's work before a recorded step, by sequences and context length.

Each sequence's table grows by a block every sixteen steps, as in drafting; the numbers are then copied to the device,
here to another place in memory. Needs no GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from specdec.engine.base import SequenceSlice
from specdec.engine.cuda_graphs.buckets import Bucket
from specdec.engine.cuda_graphs.device_tables import DeviceTables
from specdec.engine.cuda_graphs.static_inputs import StaticInputs, StepNumbers, input_size
from specdec.engine.sessions.block_manager import BlockManager, blocks_for
from specdec.engine.sessions.sequence import BlockTable

NUM_STEPS = 320
MAX_CONTEXT = 16384
SIZES = tuple((num_sequences, context) for num_sequences in (1, 64) for context in (512, 8000))


def fill_us(num_sequences: int, context: int) -> float:
    """Median microseconds of making the slices and filling the inputs of one step."""
    manager = BlockManager(num_sequences * blocks_for(MAX_CONTEXT))
    tables = [BlockTable() for _ in range(num_sequences)]
    device, bucket = torch.device("cpu"), Bucket(num_sequences, 1, blocks_for(MAX_CONTEXT))
    kept = DeviceTables(bucket.num_blocks, manager.num_blocks, device)
    inputs = StaticInputs(bucket, StepNumbers(input_size(bucket, keeps_tables=True), device), manager.num_blocks, kept)

    def slices(step: int) -> Sequence[SequenceSlice]:
        end = context + step + 1
        return [
            SequenceSlice((5,), end - 1, table.first(blocks_for(end)), 1, table=table)
            for table in tables
        ]  # fmt: skip

    times = []
    for step in range(NUM_STEPS):
        for table in tables:
            manager.grow(table, context + step + 1)
        began = time.perf_counter()
        inputs.fill(slices(step))
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    torch.set_num_threads(1)
    for num_sequences, context in SIZES:
        us = fill_us(num_sequences, context)
        print(f"{num_sequences:3} sequences of {context:5} tokens: {us:6.0f} us a step")


if __name__ == "__main__":
    main()
