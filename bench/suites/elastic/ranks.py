"""Measure the cost of dividing a model between two processes of one machine: a step's message, and the step itself.

First the message alone: a plan is packed, sent, unpacked, and answered with the other rank's part of a row of logits;
beside it, in turns, what gloo takes to broadcast as many bytes and one word back. Then steps of the demo target on two
ranks of one thread each, against one process that has two threads. Part of the suite `elastic`, which calls
`measure_ranks`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.harness.pairs import median_s, ratio_row
from bench.harness.report import progress
from bench.harness.rows import Row
from bench.systems.models import DEMO
from bench.systems.ranks import broadcast_bare, exchange_plan, rank_group
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import AUTO, EAGER, CompileOptions, LoadRequest
from specdec.engine.parallel.group import RankGroup
from specdec.engine.parallel.rank_heartbeat import RankHeartbeat
from specdec.engine.parallel.rank_loader import load_rank

NUM_RANKS = 2
#: What the message and its answer may cost beyond the bare broadcast, in milliseconds.
MOST_ON_TOP_MS = 0.3

_MODEL = LoadRequest(str(DEMO / "target"), device="cpu", dtype="float32", num_kv_blocks=64)
_NUM_ROUNDS, _NUM_QUICK_ROUNDS = 30, 3
_PER_ROUND = 40


def measure_ranks(_tokenizer_dir: Path, row: Callable[..., Row], quick: bool) -> list[Row]:
    """All rows.

    Args:
        row: makes a row of the suite.
        quick: fewer of everything.
    """
    num_rounds = _NUM_QUICK_ROUNDS if quick else _NUM_ROUNDS
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with rank_group(_MODEL, NUM_RANKS, num_rounds=num_rounds, per_round=_PER_ROUND) as ranks:
            return [*_message_rows(ranks, num_rounds, row), *_step_rows(ranks, num_rounds, row)]
    finally:
        torch.set_num_threads(num_threads)


def _message_rows(ranks: RankGroup, num_rounds: int, row: Callable[..., Row]) -> list[Row]:
    bare_ms, message_ms = [], []
    with progress("plan messages", num_rounds) as advance:
        for _ in range(num_rounds):
            bare_ms.append(median_s(partial(broadcast_bare, ranks), _PER_ROUND) * 1e3)
            message_ms.append(median_s(partial(exchange_plan, ranks), _PER_ROUND) * 1e3)
            advance()
    on_top = np.array(message_ms) - np.array(bare_ms)
    case = f"{NUM_RANKS} ranks, 8 sequences of 5 rows, gloo on loopback"
    figures = {"plan and answer": float(np.median(message_ms)), "bare broadcast": float(np.median(bare_ms))}
    return [
        *(row(case=case, system=name, metric="ms_per_step", value=ms, unit="ms")
          for name, ms in figures.items()),
        row(case=case, system="plan and answer", metric="ms_on_top", value=float(np.median(on_top)),
            unit="ms", at_most=MOST_ON_TOP_MS, num_pairs=num_rounds),
    ]  # fmt: skip


def _step_rows(ranks: RankGroup, num_rounds: int, row: Callable[..., Row]) -> list[Row]:
    systems = {"2 ranks": load_rank(_MODEL, ranks, RankHeartbeat({})), "1 process, eager": _alone(EAGER),
               "1 process, native": _alone(AUTO)}  # fmt: skip
    rows = []
    for num_rows in (1, 5):
        plan = StepPlan((SequenceSlice(tuple(range(2, 2 + num_rows)), 0, (0,), num_rows),))
        times_s: dict[str, list[float]] = {name: [] for name in systems}
        with progress(f"steps of {num_rows} rows", num_rounds) as advance:
            for _ in range(num_rounds):
                for name, worker in systems.items():
                    torch.set_num_threads(1 if name == "2 ranks" else NUM_RANKS)
                    times_s[name].append(median_s(partial(worker.execute, plan), _PER_ROUND))
                advance()
        of_case = partial(row, case=f"demo target, {num_rows} rows, {NUM_RANKS} cores")
        rows += [ratio_row(of_case, times_s, "2 ranks", name, metric="step_time_ratio") for name in list(systems)[1:]]
    systems["2 ranks"].close()
    return rows


def _alone(backend: str) -> Worker:
    return load_worker(replace(_MODEL, compiling=CompileOptions(backend)))
