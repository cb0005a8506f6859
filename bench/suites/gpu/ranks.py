"""The scaling row of suite `gpu`: a step of the random 8B model on several GPUs against the same step on one."""

import gc
from collections.abc import Callable
from functools import partial

import torch

from bench.harness.pairs import median_ratio
from bench.harness.report import progress
from bench.harness.rows import Row
from bench.suites.elastic.ranks import median_ms
from bench.systems.ranks import rank_group
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import AUTO, CUDA_GRAPHS, CompileOptions, LoadRequest, row_counts
from specdec.engine.parallel.rank_heartbeat import RankHeartbeat
from specdec.engine.parallel.rank_loader import load_rank

#: A verification of four draft tokens of one session.
_ROWS = 5
_START = 16 * 32
_NUM_ROUNDS, _NUM_QUICK_ROUNDS = 15, 3


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
    alone_ms = _step_times_ms(alone, f"gpu: 1 rank of {num_ranks}", num_rounds)
    del alone
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    with rank_group(model, num_ranks) as ranks:
        worker = load_rank(model, ranks, RankHeartbeat({}))
        divided_ms = _step_times_ms(worker, f"gpu: {num_ranks} ranks", num_rounds)
        worker.close()
    ratio = median_ratio(divided_ms, alone_ms)
    return [
        row(
            case=f"{shape}, {_ROWS} rows", system=f"{num_ranks} ranks", metric="step_time_ratio", value=ratio.median,
            unit="x", ratio_to="1 rank", low=ratio.low, high=ratio.high, num_pairs=ratio.num_pairs,
        )
    ]  # fmt: skip


def _step_times_ms(worker: Worker, title: str, num_rounds: int) -> list[float]:
    table = tuple(range(1 + _START // 16))
    worker.execute(StepPlan((SequenceSlice((7,) * _START, 0, table, 0),)))
    plan = StepPlan((SequenceSlice((7,) * _ROWS, _START, table, _ROWS),))
    times_ms = []
    with progress(title, num_rounds) as advance:
        for _ in range(num_rounds):
            times_ms.append(median_ms(partial(_run, worker, plan)))
            advance()
    return times_ms


def _run(worker: Worker, plan: StepPlan) -> None:
    worker.execute(plan)[0, 0].item()  # waits for the device
