"""The engine alone on one device: a step of target and draft against one read of their weights.

It also compares a step of the target with int8 weights, and of a deterministic target, with the plain target.

A step of one row reads every weight once (one row of the input embedding), so its floor is those bytes over the copy
bandwidth measured in the same run (bytes read plus bytes written). Called by the `gpu` suite.
"""

import gc
import os
import sys
from collections.abc import Callable
from functools import partial

import torch

from bench.harness.pairs import median_s, ratio_row
from bench.harness.report import progress
from bench.harness.rows import Row
from bench.harness.workload import GAMMA
from bench.systems.random_pair import PairModel, RandomPair
from bench.systems.ranks import rank_group
from specdec.checkpoints.artifact_cache import cache_directory
from specdec.contract.errors import SpecdecError
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import AUTO, CUDA_GRAPHS, CompileOptions, LoadRequest, row_counts
from specdec.engine.parallel.rank_heartbeat import RankHeartbeat
from specdec.engine.parallel.rank_loader import load_rank
from specdec.engine.sessions.block_manager import blocks_for

TARGET_LIMIT, DRAFT_LIMIT = 1.25, 2.0
CONTEXT_TOKENS = 512
NUM_STEPS, NUM_QUICK_STEPS = 50, 5
DTYPE = "bfloat16"
#: Row 49 of the agreed figures.
INT8_SPEEDUP = 1.5


def engine_rows(
    pair: RandomPair, device: str, shape: str, row: Callable[..., Row], copy_bytes: int, *, quick: bool
) -> list[Row]:
    """Measure steps of both models, each relative to its floor.

    Args:
        pair: models to measure.
        device: device to measure on.
        shape: name of the shape in the rows.
        row: makes a row of this suite.
        copy_bytes: size of the copy that measures bandwidth.
        quick: run few steps.
    """
    num_steps = NUM_QUICK_STEPS if quick else NUM_STEPS
    row = partial(row, case=f"{shape}, engine alone, 1 stream, context {CONTEXT_TOKENS}")
    with progress("gpu: engine", 5) as advance:
        bytes_per_s = copy_bandwidth(device, copy_bytes, num_steps)
        rows = [row(system="device", metric="copy_bandwidth", value=bytes_per_s / 1e9, unit="GB/s")]
        advance()
        for name, model, limit in (("target", pair.target, TARGET_LIMIT), ("draft", pair.draft, DRAFT_LIMIT)):
            step_s, floor_s = _loaded_step_s(model, device, num_steps), model.step_bytes / bytes_per_s
            rows.append(row(system=name, metric="step_ms", value=step_s * 1e3, unit="ms"))
            rows.append(
                row(system=name, metric="step_over_floor", value=step_s / floor_s, unit="x", ratio_to="floor",
                    at_most=limit)
            )  # fmt: skip
            advance()
        target_s = rows[1].value / 1e3
        for name, dtype, is_deterministic in (("int8", "int8", False), ("deterministic", DTYPE, True)):
            try:
                step_s = _loaded_step_s(pair.target, device, num_steps, dtype, is_deterministic=is_deterministic)
            except SpecdecError as error:
                print(f"bench gpu: target, {name}: {error.message}", file=sys.stderr)
                continue
            finally:
                advance()
            of_this = partial(row, system=f"target, {name}")
            rows.append(of_this(metric="step_ms", value=step_s * 1e3, unit="ms"))
            rows.append(
                of_this(metric="step_rate_ratio", value=target_s / step_s, unit="x", ratio_to="target",
                        required=INT8_SPEEDUP if dtype == "int8" else None)
            )  # fmt: skip
    return rows


def _loaded_step_s(
    model: PairModel, device: str, num_steps: int, dtype: str = DTYPE, *, is_deterministic: bool = False
) -> float:
    """Return `_step_s` of a model that is loaded as in the services."""
    compiling = CompileOptions(
        row_counts=row_counts(GAMMA + 1), directory=cache_directory(os.environ) / "compiled",
        is_deterministic=is_deterministic,
    )  # fmt: skip
    worker = load_worker(
        LoadRequest(str(model.directory), device=device, dtype=dtype, num_kv_blocks=256, compiling=compiling)
    )
    try:
        return _step_s(worker, device, num_steps)
    finally:
        del worker
        gc.collect()  # its parts form cycles, and the next model needs the memory


def _step_s(worker: Worker, device: str, num_steps: int) -> float:
    """Return the median time of one row after the context."""
    blocks = tuple(range(blocks_for(CONTEXT_TOKENS + 1)))
    worker.execute(StepPlan((SequenceSlice((5,) * CONTEXT_TOKENS, 0, blocks, 0),)))
    plan = StepPlan((SequenceSlice((5,), CONTEXT_TOKENS, blocks, 1),))
    return _median_s(lambda: worker.execute(plan), device, num_steps)


def copy_bandwidth(device: str, num_bytes: int, num_steps: int = NUM_STEPS) -> float:
    """Return the bytes read plus the bytes written per second."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return 2 * num_bytes / _median_s(lambda: destination.copy_(source), device, num_steps)


def _median_s(action: Callable[[], object], device: str, num_steps: int) -> float:
    def run() -> None:
        action()
        if device != "cpu":
            torch.cuda.synchronize(device)

    median_s(run, 3)  # warms up
    return median_s(run, num_steps)


#: A verification of four draft tokens of one session.
_ROWS = 5
_START = 16 * 32
_NUM_ROUNDS, _NUM_QUICK_ROUNDS, _PER_ROUND = 15, 3, 40


def scaling_rows(
    directory: str, device: str, num_ranks: int, shape: str, row: Callable[..., Row], *, quick: bool
) -> list[Row]:
    """Return one row: the time of a verification on several ranks over that on one, with CUDA graphs on both.

    Args:
        directory: the model's directory.
        device: `cuda`, or `cpu` in tests.
        num_ranks: number of GPUs.
        shape: name of the model in the row.
        row: makes a row of the suite.
        quick: fewer repetitions.
    """
    num_rounds = _NUM_QUICK_ROUNDS if quick else _NUM_ROUNDS
    compiling = CompileOptions(AUTO if device == "cpu" else CUDA_GRAPHS, row_counts(_ROWS))
    model = LoadRequest(directory, device=device, dtype="auto", compiling=compiling, num_kv_blocks=64, self_check=False)
    alone = load_worker(model)
    alone_s = _step_times_s(alone, f"gpu: 1 rank of {num_ranks}", num_rounds)
    del alone
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    with rank_group(model, num_ranks) as ranks:
        worker = load_rank(model, ranks, RankHeartbeat({}))
        divided_s = _step_times_s(worker, f"gpu: {num_ranks} ranks", num_rounds)
        worker.close()
    divided = f"{num_ranks} ranks"
    times_s = {divided: divided_s, "1 rank": alone_s}
    return [ratio_row(row, times_s, divided, "1 rank", metric="step_time_ratio", case=f"{shape}, {_ROWS} rows")]


def _step_times_s(worker: Worker, title: str, num_rounds: int) -> list[float]:
    table = tuple(range(1 + _START // 16))
    worker.execute(StepPlan((SequenceSlice((7,) * _START, 0, table, 0),)))
    plan = StepPlan((SequenceSlice((7,) * _ROWS, _START, table, _ROWS),))
    times_s = []
    with progress(title, num_rounds) as advance:
        for _ in range(num_rounds):
            times_s.append(median_s(partial(_run, worker, plan), _PER_ROUND))
            advance()
    return times_s


def _run(worker: Worker, plan: StepPlan) -> None:
    worker.execute(plan)[0, 0].item()  # waits for the device
