"""Suite `gateway`: what HTTP costs. Streams of /v1/completions through the gateway beside the same over gRPC.

One system, `specdec up`, serves both by turns: the coordinator over gRPC, and a gateway process in front of it. One
asyncio client reads text from each. The pairs are the demo pair and `deep(18, 0.02)` of its target with its draft;
outputs have 128 greedy tokens, and no two prompts share KV. A pair's time to the first token is the mean of its
streams. `--peer-bench` runs the benchmark client of another project, `vllm bench serve` or `guidellm run`, against the
gateway instead.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.pairs import MIN_PAIRS, interleave, median_difference, rate_rows, ratio_row
from bench.harness.report import progress
from bench.harness.rows import Origin, Row
from bench.harness.workload import NUM_NEW_TOKENS, prompt_token_ids
from bench.suites.gateway.peer_clients import GuideLlmClient, VllmClient, run_peer_client
from bench.systems.http_servers import GatewayServer
from bench.systems.models import DEMO, deep
from bench.systems.ours import RunningSystem
from bench.systems.served import PEERS_FOLDER
from bench.systems.text_streams import GRPC, HTTP, StreamingClient, TextStream, text_clients, tokens_per_s

SUITE = "gateway"
STREAM_COUNTS = (1, 16)
PROMPT_TOKENS = 48
NUM_RUNS = 2 * MIN_PAIRS
NUM_QUICK_RUNS = 3
NUM_WARMUP = 2
#: Share of gRPC's tokens/s that HTTP must reach.
_LEAST_RATIO = 0.95
#: Limit on what the gateway adds to the time to the first token of one stream, in milliseconds.
_MOST_TTFT_MS = 3.0
_CLIENTS = {client.name: client for client in (VllmClient(), GuideLlmClient())}


@dataclass(frozen=True)
class Batch:
    """One batch of streams."""

    streams: Sequence[TextStream]
    gateway_cpu_s: float
    """Processor time that the gateway used meanwhile, in seconds."""

    @property
    def ttft_ms(self) -> float:
        return float(np.mean([stream.ttft_s for stream in self.streams])) * 1e3

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the client of another project that is run instead, and where it is installed."""
    parser.add_argument(
        "--peer-bench",
        choices=list(_CLIENTS),
        help="run this project's benchmark client against the gateway, and no more",
    )
    parser.add_argument(
        "--peers-folder", type=Path, default=PEERS_FOLDER, metavar="DIR", help="folder that `make peers` has filled"
    )


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; print nothing but progress."""
    row = partial(Row, suite=SUITE, origin=Origin(), quick=arguments.quick)
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder, asyncio.Runner() as runner:
        if arguments.peer_bench:
            client, peers_folder = _CLIENTS[arguments.peer_bench], arguments.peers_folder
            return runner.run(run_peer_client(client, row, Path(folder), peers_folder, arguments.quick))
        deep_target = deep(DEMO / "target", Path(folder) / "target", num_layers=18, eps=0.02)
        targets = {"demo pair": DEMO / "target", "deep(18, 0.02)": deep_target}
        num_runs = NUM_QUICK_RUNS if arguments.quick else NUM_RUNS
        return [
            each
            for name, target in targets.items()
            for each in _PairRun(runner, target, num_runs).rows(partial(_named, row, name))
        ]


def _named(row: Any, pair: str, num_streams: int, **fields: Any) -> Row:
    streams = "1 stream" if num_streams == 1 else f"{num_streams} streams"
    made: Row = row(case=f"{pair}, {streams}, greedy", **fields)
    return made


class _PairRun:
    """The measurements of one pair of models."""

    def __init__(self, runner: asyncio.Runner, target: Path, num_runs: int) -> None:
        self._runner, self._target, self._num_runs = runner, target, num_runs
        self._prompts = prompt_token_ids(target, PROMPT_TOKENS)
        self._num_prompts = 0

    def rows(self, row: Any) -> list[Row]:
        """Run all batches and return the rows; `row(num_streams, ...)` makes one."""
        rows: list[Row] = []
        total = 2 * len(STREAM_COUNTS) * (NUM_WARMUP + self._num_runs)
        with RunningSystem(self._target, DEMO / "draft") as system, progress(self._target.name, total) as advance:
            self._gateway = GatewayServer(system.endpoint)
            with text_clients(self._runner.run, system.endpoint, self._gateway) as clients:
                for num_streams in STREAM_COUNTS:
                    systems = {name: partial(self._batch, each, num_streams) for name, each in clients.items()}
                    interleave(range(NUM_WARMUP), systems, advance)
                    batches = interleave(range(self._num_runs), systems, advance)
                    rows += batch_rows(partial(row, num_streams), batches, _MOST_TTFT_MS if num_streams == 1 else None)
        return rows

    def _batch(self, client: StreamingClient, num_streams: int, index: int) -> Batch:
        first = index * num_streams
        prompts = [self._prompt(first + stream) for stream in range(num_streams)]
        before_s = self._gateway.cpu_s()
        streams = self._runner.run(client.run(prompts, NUM_NEW_TOKENS))
        return Batch(streams, self._gateway.cpu_s() - before_s)

    def _prompt(self, index: int) -> list[int]:
        """Return a prompt: both sides of a pair get the same texts, each with a second token of its own."""
        prompt = list(self._prompts[index % len(self._prompts)])
        self._num_prompts += 1
        prompt[1] = 300 + self._num_prompts % 1_500
        return prompt


def batch_rows(row: Any, batches: dict[str, list[Batch]], most_ttft_ms: float | None) -> list[Row]:
    """Return the rows of one case; `most_ttft_ms` limits what the gateway adds to the time to the first token."""
    rates = {name: [tokens_per_s(batch.streams) for batch in done] for name, done in batches.items()}
    ttft_ms = {name: [batch.ttft_ms for batch in done] for name, done in batches.items()}
    added = median_difference(ttft_ms[HTTP], ttft_ms[GRPC])
    cpu_s = sum(batch.gateway_cpu_s for batch in batches[HTTP])
    cpu_us = cpu_s * 1e6 / sum(batch.num_tokens for batch in batches[HTTP])
    rows: list[Row] = [
        ratio_row(row, rates, HTTP, GRPC, required=_LEAST_RATIO),
        row(system=HTTP, metric="ttft_added_ms", unit="ms", ratio_to=GRPC, at_most=most_ttft_ms, **added.fields),
        row(system="gateway", metric="cpu_us_per_token", value=cpu_us, unit="us"),
        *rate_rows(row, rates),
    ]
    for name, done in batches.items():
        all_ms = [stream.ttft_s * 1e3 for batch in done for stream in batch.streams]
        rows.append(row(system=name, metric="ttft_ms_p50", value=float(np.median(all_ms)), unit="ms"))
    return rows
