"""Gamma auto beside fixed gammas while many streams share one target whose rows cost time.

Real processes around simulated engines (70B/1B, two draft replicas, pre-drafting off), all streams at once. The
gamma that is best for one stream overloads a target that many streams share, and sessions with the same past make the
same choice; this case shows both effects. Part of the suite `orchestration`, which calls this.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.pairs import interleave, median_ratio
from bench.harness.report import progress
from bench.harness.rows import Row
from bench.harness.streams import StreamProcess, StreamRequest
from bench.systems.simulated import ProcessSystem, simulated_replicas

STREAM_COUNTS = (16, 64)
FIXED_GAMMAS = (2, 4, 8)
NUM_TOKENS = 96
AUTO = "gamma auto"


def measure_crowd(
    tokenizer_dir: Path,
    model: str,
    stream_request: Callable[..., StreamRequest],
    num_runs: int,
    row: Callable[..., Row],
) -> list[Row]:
    """Return tokens a second of all streams: gamma auto over the best fixed gamma, and each of them.

    Args:
        tokenizer_dir: see `write_tokenizer`.
        model: the simulated pair.
        stream_request: makes the request of one stream from its index and number of tokens.
        num_runs: interleaved runs of each.
        row: makes a row of the suite.
    """
    gammas: dict[str, int | None] = {f"gamma {gamma}": gamma for gamma in FIXED_GAMMAS} | {AUTO: None}
    rows = []
    with (
        ProcessSystem(tokenizer_dir, simulated_replicas(model, num_drafts=2)) as system,
        StreamProcess(system.endpoint) as clients,
        progress("crowd", (num_runs + 1) * len(STREAM_COUNTS) * len(gammas)) as advance,
    ):
        for num_streams in STREAM_COUNTS:
            systems = {
                label: partial(
                    _tokens_per_s, clients=clients, make=partial(_requests, stream_request, num_streams, gamma)
                )
                for label, gamma in gammas.items()
            }
            # The first batch of each warms caches and lets gamma auto measure what rows cost.
            interleave(range(1), systems, advance)
            rates = interleave(range(1, num_runs + 1), systems, advance)
            rows += _rows(rates, partial(row, row=None, case=f"70B/1B, {num_streams} streams, greedy, sync"))
    return rows


def _requests(
    stream_request: Callable[..., StreamRequest], num_streams: int, gamma: int | None, index: int
) -> list[StreamRequest]:
    first = index * num_streams
    return [stream_request(first + stream, NUM_TOKENS, gamma=gamma) for stream in range(num_streams)]


def _tokens_per_s(index: int, clients: StreamProcess, make: Callable[[int], list[StreamRequest]]) -> float:
    runs = clients.run(make(index))
    return sum(run.num_tokens for run in runs) / max(run.chunk_s[-1] for run in runs)


def _rows(rates: dict[str, list[float]], row: Callable[..., Row]) -> list[Row]:
    best = max((label for label in rates if label != AUTO), key=lambda label: float(np.median(rates[label])))
    ratio = median_ratio(rates[AUTO], rates[best])
    return [
        row(
            system=AUTO, metric="tokens_per_s_ratio", value=ratio.median, unit="x", ratio_to=f"best fixed ({best})",
            low=ratio.low, high=ratio.high, num_pairs=ratio.num_pairs,
        ),
        *(
            row(system=label, metric="tokens_per_s", value=float(np.median(measured)), unit="tokens/s")
            for label, measured in rates.items()
        ),
    ]  # fmt: skip
