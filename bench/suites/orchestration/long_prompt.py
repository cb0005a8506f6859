"""Measure what a long prompt does to running streams that share its target.

Real processes around simulated engines (70B/1B, pre-drafting off): the inter-token latency of running streams while a
long prompt is prefilled, and without it, with the target's default prefill budget and with practically none. A gap is
the time between two chunks of one stream, one round; those count that overlap the reading of the prompt, or, without a
prompt, the same stretch of the run. Part of the suite `orchestration`, which calls this.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.pairs import interleave, median_ratio
from bench.harness.report import progress
from bench.harness.rows import Row
from bench.harness.streams import StreamProcess, StreamRequest, StreamRun
from bench.systems.simulated import ProcessSystem, simulated_replicas

MODEL = "simulated:70b-1b,predraft=off"

NUM_RUNNING = 8
NUM_RUNNING_TOKENS = 256
PROMPT_TOKENS = 2_000
#: By then all streams decode.
ARRIVAL_S = 0.5
UNBOUNDED_MS = 1e6

MakeRequest = Callable[..., StreamRequest]
"""Makes the request of one stream from its index and number of tokens."""

_Run = tuple[list[StreamRun], StreamRun | None]


def measure_long_prompt(tokenizer_dir: Path, request: MakeRequest, num_runs: int, row: Callable[..., Row]) -> list[Row]:
    """Return the p99 of the gaps with the prompt over that without it, both, and how long the prompt took.

    Args:
        tokenizer_dir: see `write_tokenizer`.
        request: makes the request of one stream.
        num_runs: interleaved pairs.
        row: makes a row of the suite.
    """
    rows = []
    for name, budget in (("default budget", ()), ("unbounded", ("--prefill-budget-ms", str(UNBOUNDED_MS)))):
        with (
            ProcessSystem(tokenizer_dir, simulated_replicas(MODEL, arguments=budget)) as system,
            StreamProcess(system.endpoint) as clients,
            progress(f"long prompt, {name}", 2 * num_runs + 1) as advance,
        ):
            systems = {
                kind: partial(_run, clients=clients, request=request, has_prompt=kind == "prompt")
                for kind in ("prompt", "alone")
            }
            # The first batch warms caches and lets the scheduler measure what a prompt costs.
            systems["prompt"](num_runs)
            advance()
            runs = interleave(range(num_runs), systems, advance)
        rows += _prompt_rows(runs, partial(row, system=name))
    return rows


def _run(index: int, clients: StreamProcess, request: MakeRequest, has_prompt: bool) -> _Run:
    first = index * (NUM_RUNNING + 1) * 2
    requests = [request(first + stream, NUM_RUNNING_TOKENS, gamma=4) for stream in range(NUM_RUNNING)]
    if has_prompt:
        ids = [1 + (first * 7 + position * 11) % 100_000 for position in range(PROMPT_TOKENS)]
        requests.append(StreamRequest(ids, {"max_new_tokens": 1, "temperature": 0.0}, ARRIVAL_S))
    runs = clients.run(requests)
    return runs[:NUM_RUNNING], runs[NUM_RUNNING] if has_prompt else None


def _prompt_rows(runs: dict[str, list[_Run]], row: Callable[..., Row]) -> list[Row]:
    row = partial(row, case=f"70B/1B, gamma 4, {NUM_RUNNING} streams, a prompt of {PROMPT_TOKENS} tokens arrives")
    windows = [(prompt.began_s, prompt.chunk_s[0]) for _, prompt in runs["prompt"] if prompt is not None]
    p99_s = {
        kind: [gap_p99_s(streams, *window) for (streams, _), window in zip(done, windows, strict=True)]
        for kind, done in runs.items()
    }
    ratio = median_ratio(p99_s["prompt"], p99_s["alone"])
    times_s = {
        "itl_p99_ms": p99_s["prompt"],
        "itl_p99_without_prompt_ms": p99_s["alone"],
        "prompt_ttft_ms": [end_s - begin_s for begin_s, end_s in windows],
    }
    return [
        row(metric="itl_p99_ratio", unit="x", ratio_to="no prompt", **ratio.fields),
        *(row(metric=metric, value=float(np.median(each)) * 1e3, unit="ms") for metric, each in times_s.items()),
    ]


def gap_p99_s(runs: Sequence[StreamRun], begin_s: float, end_s: float) -> float:
    """Return the 99th percentile of the gaps that overlap a stretch of the batch."""
    gaps = [
        later - earlier
        for run in runs
        for earlier, later in zip(run.chunk_s, run.chunk_s[1:], strict=False)
        if later > begin_s and earlier < end_s
    ]
    return float(np.quantile(gaps, 0.99))
