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

from bench.harness.pairs import rate_rows, ratio_row, take_turns
from bench.harness.report import waiting
from bench.harness.rows import Row
from bench.harness.streams import StreamProcess, StreamRequest, StreamRun, tokens_per_s
from bench.systems.simulated import ProcessSystem, redis_server, simulated_replicas

PREFIX_TOKENS = 1_000
NUM_SESSIONS = 32
PREFIX_PAIR = "simulated:8b-0.6b,predraft=off"
#: The agreed case, and a case of documents that a few sessions each ask about.
NUM_PREFIXES = (1, 8)

NUM_RUNS, NUM_QUICK_RUNS = 9, 2
CROWD_PAIR = "simulated:70b-1b,predraft=off"
NUM_STREAMS = 64
NUM_TOKENS = 96


def measure_prefixes(tokenizer_dir: Path, row: Callable[..., Row], quick: bool) -> list[Row]:
    """All rows.

    Args:
        tokenizer_dir: see `write_tokenizer`.
        row: makes a row of the suite.
        quick: fewer runs of what is compared in time.
    """
    rows = [_sharing_row(tokenizer_dir, num_prefixes, row) for num_prefixes in NUM_PREFIXES]
    return rows + _measure_coordinators(tokenizer_dir, NUM_QUICK_RUNS if quick else NUM_RUNS, row)


def _sharing_row(tokenizer_dir: Path, num_prefixes: int, row: Callable[..., Row]) -> Row:
    sessions = f"{NUM_SESSIONS} sessions, {num_prefixes} prefixes of {PREFIX_TOKENS} tokens"
    case = f"8B/0.6B, {sessions}, 2 targets, 2 coordinators"
    with waiting(f"{num_prefixes} shared prefixes"):
        share = _cached_share(tokenizer_dir, num_prefixes)
    required = 0.9 if num_prefixes == 1 else None
    return row(
        case=case, system="directory", metric="prefix_tokens_cached", value=share, unit="share", required=required
    )


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
        rates = take_turns("coordinators", systems, range(1, num_runs + 1), range(1))
    row = partial(row, case=f"70B/1B, {NUM_STREAMS} streams on one target, greedy, gamma auto")
    return [ratio_row(row, rates, "2 coordinators", "1 coordinator", required=0.95), *rate_rows(row, rates)]


def _tokens_per_s(endpoints: Sequence[str], index: int) -> float:
    options = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0}
    requests = [
        StreamRequest([1 + (index * NUM_STREAMS + stream) % 100_000, 2, 3], options | {"seed": index + stream})
        for stream in range(NUM_STREAMS)
    ]
    # Always two client processes, so that the compared systems differ in their coordinators alone.
    runs = _run_through([endpoints[0], endpoints[-1]], [requests[0::2], requests[1::2]])
    return tokens_per_s(runs)


def _run_through(endpoints: Sequence[str], batches: Sequence[Sequence[StreamRequest]]) -> list[StreamRun]:
    """Run the batches at once, each in its own client process."""
    with ExitStack() as stack:
        clients = [stack.enter_context(StreamProcess(endpoint)) for endpoint in endpoints]
        with ThreadPoolExecutor(len(clients)) as threads:
            done = threads.map(StreamProcess.run, clients, batches)
            return [run for runs in done for run in runs]
