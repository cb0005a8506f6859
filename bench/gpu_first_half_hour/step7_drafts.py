"""Minutes 28 to 30: a draft of five tokens as one multi-step draft, and in single steps with a read after each.

Greedy, by batch size. `python -m bench.fill_times` measures the host's work before a step, by context length.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.gpu_first_half_hour.results import device_name, results_folder, write
from bench.gpu_first_half_hour.step5_kernels import write_model
from specdec.engine.base import MultiStepDrafts, SequenceSlice, StepPlan, Worker
from specdec.engine.loader import load_worker
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.engine.sessions.block_manager import BlockManager, blocks_for
from specdec.engine.sessions.sequence import BlockTable

CONTEXT, NUM_TOKENS, NUM_RUNS, BATCHES = 512, 5, 20, (1, 16)


def plan_of(tables: list[BlockTable], step: int) -> StepPlan:
    end = CONTEXT + step + 1
    return StepPlan(
        tuple(SequenceSlice((5,), end - 1, table.first(blocks_for(end)), 1, table=table) for table in tables)
    )


def one_run(worker: Worker, tables: list[BlockTable]) -> None:
    drawn = []

    def draw(index: int, logits: torch.Tensor) -> torch.Tensor:
        drawn.append(logits.argmax(dim=-1))
        return drawn[-1]

    worker.draft(plan_of(tables, 0), NUM_TOKENS, draw)
    torch.stack(drawn).cpu()


def step_by_step(worker: Worker, tables: list[BlockTable]) -> None:
    for step in range(NUM_TOKENS):
        StepLogits.read(worker.execute(plan_of(tables, step)))


def median_us(run: Callable[[Worker, list[BlockTable]], None], worker: Worker, tables: list[BlockTable]) -> float:
    times = []
    for _ in range(NUM_RUNS + 3):
        began = time.perf_counter()
        run(worker, tables)
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:]) * 1e6


def main() -> None:
    results, device = results_folder(), device_name()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), device)
        num_blocks = max(BATCHES) * blocks_for(CONTEXT + NUM_TOKENS)
        worker = load_worker(
            LoadRequest(
                folder,
                device=device,
                dtype="bfloat16",
                num_kv_blocks=num_blocks,
                compiling=CompileOptions(row_counts=(1, 2)),
                self_check=False,
            )
        )
    found = {}
    for batch in BATCHES:
        manager = BlockManager(num_blocks)
        tables = [BlockTable() for _ in range(batch)]
        for table in tables:
            manager.grow(table, CONTEXT + NUM_TOKENS)
        found[f"batch_{batch}"] = {"step_by_step_us": median_us(step_by_step, worker, tables)}
        if worker.multi_step_drafts is MultiStepDrafts.ANY:  # not on a CPU
            found[f"batch_{batch}"]["one_run_us"] = median_us(one_run, worker, tables)
    write(results, "step7_drafts", found)


if __name__ == "__main__":
    main()
