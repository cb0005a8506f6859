"""Time inside the calls that count metrics, as a share of the time of the rounds in which they are made.

The services run under `bench.suites.observability.calls`. The calls of all services count as if each delayed the round,
although some of them run beside it. Part of the suite `observability`, which calls this.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.pairs import median_ratio
from bench.harness.report import progress
from bench.harness.rows import Row
from bench.harness.streams import StreamProcess
from bench.harness.workload import OwnPrompts, prompt_token_ids
from bench.suites.observability.calls import Observed, read_observed
from bench.suites.observability.streams import (
    MOST_COST,
    PROMPT_TOKENS,
    case_of,
    model_replicas,
    requests,
    service_environ,
)
from bench.systems.simulated import ProcessSystem

#: How the figures were taken, since no service runs without metrics.
_IN_PROCESS = ", in process"


@dataclass(frozen=True)
class CountedBatch:
    """One batch of streams with the calls that counted it."""

    num_rounds: int
    seconds: float
    calls: Mapping[str, Observed]
    """Calls that counted the batch, by the service that made them."""

    @property
    def call_s(self) -> float:
        return sum(calls.seconds for calls in self.calls.values())


def measure_metrics(pair: str, target: Path, num_runs: Mapping[int, int], row: Callable[..., Row]) -> list[Row]:
    """Return the cost of counting with one pair of models.

    Args:
        pair: its name.
        target: its target; the draft is the demo pair's.
        num_runs: batches by number of streams.
        row: makes a row of the suite.
    """
    rows: list[Row] = []
    prompts = OwnPrompts(prompt_token_ids(target, PROMPT_TOKENS))
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as name:
        folder = Path(name)
        with (
            ProcessSystem(
                target,
                model_replicas(target),
                runner=("bench.suites.observability.calls", name),
                environ=service_environ(),
            ) as system,
            StreamProcess(system.endpoint) as clients,
            progress(f"metrics, {pair}", sum(num_runs.values()) + len(num_runs)) as advance,
        ):
            for num_streams, number in num_runs.items():
                batches = []
                for _ in range(number + 1):  # the first one warms up
                    batches.append(_batch(clients, folder, prompts.batch(num_streams)))
                    advance()
                rows += metrics_rows(partial(row, case=case_of(pair, num_streams)), batches[1:])
    return rows


def _batch(clients: StreamProcess, folder: Path, prompts: Sequence[list[int]]) -> CountedBatch:
    before = read_observed(folder)
    runs = clients.run(requests(prompts))
    calls = {service: each.since(before[service]) for service, each in read_observed(folder).items()}
    num_rounds = sum(run.stats["num_rounds"] for run in runs)
    return CountedBatch(num_rounds, max(run.chunk_s[-1] for run in runs), calls)


def metrics_rows(row: Callable[..., Row], batches: Sequence[CountedBatch]) -> list[Row]:
    """Return the rows of one case. The share says in its name that it was taken in the processes."""
    share = median_ratio([batch.call_s for batch in batches], [batch.seconds for batch in batches])
    num_rounds = sum(batch.num_rounds for batch in batches)
    rows = [
        row(
            system=f"metrics{_IN_PROCESS}", metric="share_of_round", value=share.median, unit="of the time",
            low=share.low, high=share.high, num_pairs=share.num_pairs, at_most=MOST_COST,
        )
    ]  # fmt: skip
    for service in batches[0].calls:
        used = [batch.calls[service] for batch in batches]
        call_us = sum(calls.seconds for calls in used) * 1e6 / num_rounds
        num_calls = sum(calls.num_calls for calls in used) / num_rounds
        rows.append(row(system=service + _IN_PROCESS, metric="metrics_us_per_round", value=call_us, unit="us"))
        rows.append(row(system=service + _IN_PROCESS, metric="calls_per_round", value=num_calls, unit="calls"))
    round_ms = float(np.median([batch.seconds * 1e3 / batch.num_rounds for batch in batches]))
    return [*rows, row(system="round", metric="time_per_round_ms", value=round_ms, unit="ms")]
