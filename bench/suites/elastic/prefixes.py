"""Measure what coordinators that share replicas learn: prefixes through Redis, load through the target's answers.

Real processes around simulated engines and a redis-server. The first case measures the share of a common prefix that
is served from replicas' caches. Sessions run one after the
other, because sessions that begin together prefill together in any case. Second, gamma auto of two coordinators on
one target against one coordinator with all the streams. Part of the suite `elastic`, which calls this.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.pairs import interleave, median_ratio
from bench.harness.report import progress
from bench.harness.rows import Row
from bench.harness.streams import StreamProcess, StreamRequest, StreamRun
from bench.systems.simulated import ProcessSystem, redis_server, simulated_replicas

PREFIX_TOKENS = 1_000
NUM_SESSIONS = 32
PREFIX_PAIR = "simulated:8b-0.6b,predraft=off"
#: The agreed case, and a case of documents that a few sessions each ask about.
NUM_PREFIXES = (1, 8)

CROWD_PAIR = "simulated:70b-1b,predraft=off"
NUM_STREAMS = 64
NUM_TOKENS = 96


def measure_prefixes(tokenizer_dir: Path, num_runs: int, row: Callable[..., Row]) -> list[Row]:
    """All rows.

    Args:
        tokenizer_dir: see `write_tokenizer`.
        num_runs: interleaved runs of what is compared in time.
        row: makes a row of the suite, marked as simulated.
    """
    rows = [row_ for num_prefixes in NUM_PREFIXES for row_ in _measure_sharing(tokenizer_dir, num_prefixes, row)]
    return rows + _measure_coordinators(tokenizer_dir, num_runs, row)


def _measure_sharing(tokenizer_dir: Path, num_prefixes: int, row: Callable[..., Row]) -> list[Row]:
    sessions = f"{NUM_SESSIONS} sessions, {num_prefixes} prefixes of {PREFIX_TOKENS} tokens"
    case = f"8B/0.6B, {sessions}, 2 targets, 2 coordinators"
    with progress(f"{num_prefixes} shared prefixes", 1) as advance:
        share = _cached_share(tokenizer_dir, num_prefixes)
        advance()
    row = partial(row, row=None, case=case, metric="prefix_tokens_cached", unit="share")
    required = 0.9 if num_prefixes == 1 else None
    return [row(system="directory", value=share, required=required)]


def _cached_share(tokenizer_dir: Path, num_prefixes: int) -> float:
    """Share of the prefixes' tokens that needed no forward pass of a target."""
    requests = [
        StreamRequest(
            [*range(1 + 1_000 * prefix, 1 + 1_000 * prefix + PREFIX_TOKENS), 100_000 + index],
            {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0.0, "seed": index, "gamma": 4},
        )
        for index in range(NUM_SESSIONS)
        for prefix in [index // 2 % num_prefixes]
    ]
    with (
        redis_server() as redis_url,
        ProcessSystem(
            tokenizer_dir,
            simulated_replicas(PREFIX_PAIR, num_drafts=2, num_targets=2),
            redis_url=redis_url,
            num_coordinators=2,
        ) as system,
        StreamProcess(system.endpoints[0]) as one,
        StreamProcess(system.endpoints[1]) as other,
    ):
        runs = [run for index, request in enumerate(requests) for run in (one, other)[index % 2].run([request])]
    return sum(min(run.num_cached_prompt_tokens, PREFIX_TOKENS) for run in runs) / (NUM_SESSIONS * PREFIX_TOKENS)


def _measure_coordinators(tokenizer_dir: Path, num_runs: int, row: Callable[..., Row]) -> list[Row]:
    with ExitStack() as stack:
        systems = {}
        for name, num_coordinators in (("1 coordinator", 1), ("2 coordinators", 2)):
            redis_url = stack.enter_context(redis_server())
            system = ProcessSystem(
                tokenizer_dir,
                simulated_replicas(CROWD_PAIR, num_drafts=2),
                redis_url=redis_url,
                num_coordinators=num_coordinators,
            )
            systems[name] = partial(_tokens_per_s, stack.enter_context(system).endpoints)
        with progress("coordinators", (num_runs + 1) * len(systems)) as advance:
            interleave(range(1), systems, advance)  # warm up
            rates = interleave(range(1, num_runs + 1), systems, advance)
    ratio = median_ratio(rates["2 coordinators"], rates["1 coordinator"])
    row = partial(row, row=None, case=f"70B/1B, {NUM_STREAMS} streams on one target, greedy, gamma auto")
    return [
        row(
            system="2 coordinators", metric="tokens_per_s_ratio", value=ratio.median, unit="x",
            ratio_to="1 coordinator", low=ratio.low, high=ratio.high, num_pairs=ratio.num_pairs, required=0.95,
        ),
        *(
            row(system=name, metric="tokens_per_s", value=float(np.median(measured)), unit="tokens/s")
            for name, measured in rates.items()
        ),
    ]  # fmt: skip


def _tokens_per_s(endpoints: Sequence[str], index: int) -> float:
    options = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0}
    requests = [
        StreamRequest([1 + (index * NUM_STREAMS + stream) % 100_000, 2, 3], options | {"seed": index + stream})
        for stream in range(NUM_STREAMS)
    ]
    # Always two client processes, so that the compared systems differ in their coordinators alone.
    runs = _run_through([endpoints[0], endpoints[-1]], [requests[0::2], requests[1::2]])
    return sum(run.num_tokens for run in runs) / max(run.chunk_s[-1] for run in runs)


def _run_through(endpoints: Sequence[str], batches: Sequence[Sequence[StreamRequest]]) -> list[StreamRun]:
    """Run the batches at once, each in its own client process."""
    with ExitStack() as stack:
        clients = [stack.enter_context(StreamProcess(endpoint)) for endpoint in endpoints]
        with ThreadPoolExecutor(len(clients)) as threads:
            done = threads.map(StreamProcess.run, clients, batches)
            return [run for runs in done for run in runs]
