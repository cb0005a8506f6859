"""Choose the number of CPU threads of a step by measurement: one, all cores but one, or all.

A step waits for its slowest thread, and coordinator, store and client run beside it. If they have no core left, a step
that is faster by itself makes slower rounds (docs/history/log.md), unless it is much faster. Called by
`service.replica_main` on a worker that does not serve yet, while other services of the machine may still load. Their
load makes several threads wait for each other, so only one thread is timed well beside it: long rounds are given the
cores unmeasured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from specdec.engine.base import SequenceSlice, StepPlan, Worker

_log = logging.getLogger(__name__)

#: Rows of the timed steps: a single token, and a round of four draft tokens and the token before them.
_ROWS = (1, 5)
#: Share of a round's time that more threads must save.
_WORTH_A_CORE = 0.1
#: The same for threads that leave no core to other processes: a fifth was measured to be too little, a half enough.
_WORTH_THE_LAST_CORE = 0.3
#: Seconds that they must save as well: other processes need that core for longer than this in a round.
_WORTH_THE_LAST_CORE_S = 0.005
#: A round of this length with one thread is bound by weights and products, which more threads share.
_LONG_ROUND_S = 0.1
_MEASURING_S = 0.5
_MOST_CYCLES = 8


def choose_threads(round_s: Mapping[int, float], num_cores: int) -> int:
    """Return the number of threads to use.

    Args:
        round_s: seconds of a round's steps by number of threads. Not empty.
        num_cores: number of threads that leaves no core to other processes.
    """
    chosen = min(round_s)
    for count in sorted(round_s):
        share, least_s = (_WORTH_A_CORE, 0.0) if count < num_cores else (_WORTH_THE_LAST_CORE, _WORTH_THE_LAST_CORE_S)
        if round_s[chosen] - round_s[count] > max(share * round_s[chosen], least_s):
            chosen = count
    return chosen


def measure_rounds(
    worker: Worker, counts: Sequence[int], clock: Callable[[], float] = time.thread_time
) -> Mapping[int, float]:
    """Return the seconds of a round by number of threads: the best of a few, measured in turns within half a second.

    They are seconds of the calling thread's processor time. It takes part in the whole step, and what other processes
    take of the processors is not in it, except that it spins for a while where it waits for another thread. If steps
    are too long for half a second, each kind runs once. One of `counts` is set as the number of threads afterwards.
    """
    rows = [min(count, worker.shape.max_context_tokens) for count in _ROWS]
    plans = [StepPlan((SequenceSlice((0,) * count, 0, (0,), count),)) for count in rows]
    best: dict[tuple[int, int], float] = {}
    began_s = clock()
    for _ in range(_MOST_CYCLES):
        for count in counts:
            torch.set_num_threads(count)
            for index, plan in enumerate(plans):
                step_began_s = clock()
                worker.execute(plan)
                best[count, index] = min(clock() - step_began_s, best.get((count, index), float("inf")))
        if clock() - began_s > _MEASURING_S:
            break
    return {count: sum(best[count, index] for index in range(len(plans))) for count in counts}


def settle_threads(worker: Worker, clock: Callable[[], float] = time.thread_time) -> None:
    """Set this process's number of threads to the one with the fastest rounds, if the worker is on a CPU; log it.

    Where rounds are long, those are all threads but one, or both of two.
    """
    num_cores = torch.get_num_threads()
    if worker.shape.device != "cpu" or num_cores < 2:
        return
    round_s = dict(measure_rounds(worker, [1], clock))
    if round_s[1] >= _LONG_ROUND_S:
        num_threads = max(2, num_cores - 1)
    else:
        round_s |= measure_rounds(worker, sorted({num_cores - 1, num_cores} - {1}), clock)
        num_threads = choose_threads(round_s, num_cores)
    torch.set_num_threads(num_threads)
    timings = ", ".join(f"{seconds * 1e3:.1f} ms with {count}" for count, seconds in round_s.items())
    _log.info("threads: %d (a step of one row and one of five: %s)", num_threads, timings)
