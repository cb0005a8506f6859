"""Throughput with the losslessness audit beside throughput without it.

Real processes around simulated engines (70B/1B, pre-drafting off), one coordinator for each share of audited rounds. An
audit of every round bounds what the default share costs: the default audits one round in 500. Part of the suite
`orchestration`, which calls this.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.pairs import interleave, median_ratio
from bench.harness.report import progress
from bench.harness.rows import Row
from bench.harness.streams import StreamProcess, StreamRequest
from bench.systems.simulated import ProcessSystem, simulated_replicas
from specdec.settings.coordinator import CoordinatorSettings

STREAM_COUNTS = (1, 16)
GAMMA = 4
NUM_TOKENS = 192
WITHOUT, DEFAULT, EVERY = "no audit", "default share", "every round"
SHARES = {WITHOUT: 0.0, DEFAULT: CoordinatorSettings.model_fields["audit_share"].default, EVERY: 1.0}
#: Largest share of the time that audits may take at the default share.
_MOST_COST = 0.01


def measure_audit(
    tokenizer_dir: Path,
    model: str,
    stream_request: Callable[..., StreamRequest],
    num_runs: int,
    row: Callable[..., Row],
) -> list[Row]:
    """Return tokens a second of all streams at each share, and their ratios to no audit.

    Args:
        tokenizer_dir: see `write_tokenizer`.
        model: the simulated pair.
        stream_request: makes the request of one stream from its index and number of tokens.
        num_runs: interleaved runs of each.
        row: makes a row of the suite.
    """
    rows = []
    with ExitStack() as stack, progress("audit", (num_runs + 1) * len(STREAM_COUNTS) * len(SHARES)) as advance:
        clients = {label: _clients(stack, tokenizer_dir, model, share) for label, share in SHARES.items()}
        for num_streams in STREAM_COUNTS:
            make = partial(_requests, stream_request, num_streams)
            systems = {
                label: partial(_tokens_per_s, clients=of_share, make=make) for label, of_share in clients.items()
            }
            interleave(range(1), systems, advance)  # warms caches
            rates = interleave(range(1, num_runs + 1), systems, advance)
            rows += _rows(rates, partial(row, case=f"70B/1B, gamma {GAMMA}, {num_streams} streams, greedy, sync"))
    return rows


def _clients(stack: ExitStack, tokenizer_dir: Path, model: str, share: float) -> StreamProcess:
    arguments = ["--audit-share", str(share)]
    system = ProcessSystem(tokenizer_dir, simulated_replicas(model), coordinator_arguments=arguments)
    return stack.enter_context(StreamProcess(stack.enter_context(system).endpoint))


def _requests(stream_request: Callable[..., StreamRequest], num_streams: int, index: int) -> list[StreamRequest]:
    first = index * num_streams
    return [stream_request(first + stream, NUM_TOKENS, gamma=GAMMA) for stream in range(num_streams)]


def _tokens_per_s(index: int, clients: StreamProcess, make: Callable[[int], list[StreamRequest]]) -> float:
    runs = clients.run(make(index))
    return sum(run.num_tokens for run in runs) / max(run.chunk_s[-1] for run in runs)


def _rows(rates: dict[str, list[float]], row: Callable[..., Row]) -> list[Row]:
    rows = []
    for label, required in ((DEFAULT, 1.0 - _MOST_COST), (EVERY, None)):
        ratio = median_ratio(rates[label], rates[WITHOUT])
        rows.append(
            row(
                row=None, system=label, metric="tokens_per_s_ratio", value=ratio.median, unit="x", ratio_to=WITHOUT,
                low=ratio.low, high=ratio.high, num_pairs=ratio.num_pairs, required=required,
            )
        )  # fmt: skip
        if label == EVERY:
            # What a run at the default share shows is far below the machine's noise.
            cost = SHARES[DEFAULT] * (1.0 / ratio.median - 1.0)
            rows.append(
                row(row=None, system=DEFAULT, metric="cost_share", value=cost, unit="of the time", at_most=_MOST_COST)
            )
    return rows + [
        row(row=None, system=label, metric="tokens_per_s", value=float(np.median(measured)), unit="tokens/s")
        for label, measured in rates.items()
    ]
