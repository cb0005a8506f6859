"""Suite `orchestration`: the real processes around simulated engines against the ideal of the configured numbers.

Rows 7 to 9 and 12, and what a long prompt does to running streams (`long_prompt`). A redis-server holds the sessions
of the agreed rows. Every figure is simulated: forward passes are waits of a stated length, acceptance is set, and delay
is added at the engines' ends of both links (a quarter of the stated round-trip time on each of a round's four
messages). Efficiency is the time per round of docs/protocol.md section 6 over the time measured at the client, without
prefill and without rounds that the token limit cuts short.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.pairs import best_row, median_ratio, rate_rows, ratio_row, take_turns
from bench.harness.rows import Origin, Row
from bench.harness.streams import StreamProcess, StreamRequest, StreamRun
from bench.suites.orchestration.long_prompt import measure_long_prompt
from bench.systems.bare_messages import CARRIERS, Echoes
from bench.systems.simulated import (
    ProcessSystem,
    best_gamma,
    ideal_round_s,
    redis_server,
    simulated_replicas,
    write_tokenizer,
)
from specdec.engine.simulated.simulated_pair import simulated_pair

SUITE = "orchestration"
PAIR = "simulated:70b-1b"
GAMMA = 4
DELAYS_MS = (0, 1, 5, 14)
#: Drifts over one output: three stretches of equal length.
DRIFT = "alpha=0.9/0.4/0.9"
FIXED_GAMMAS = (1, 2, 4, 6, 8)
AUTO = "gamma auto"
NUM_RUNS, NUM_QUICK_RUNS = 9, 2
NUM_TOKENS, NUM_QUICK_TOKENS = 384, 96
PROMPT_TOKENS = 32
#: Limits of a round's time above its ideal and of its processor time, relative to bare messages in the same run.
_MOST_BESIDE_BARE = 2.5
_BARE_NAMES = {"grpc": "gRPC echoes", "socket": "socket echoes"}
_IDLE_S = 0.02
#: The agreed rows by their numbers, and rows that only inform.
FIGURES = ["7", "8", "9", "12", "long_prompt"]

Measure = Callable[[int], StreamRun]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the choice of rows."""
    parser.add_argument("--rows", nargs="+", choices=FIGURES, default=FIGURES, help="only these rows")


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; prints nothing but progress."""
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        suite = _Suite(write_tokenizer(Path(folder)), arguments.quick)
        measures = [suite.sync, suite.predrafted, suite.predrafted_against_sync, suite.drifting, suite.long_prompt]
        measure_of = dict(zip(FIGURES, measures, strict=True))
        return [row for name in arguments.rows for row in measure_of[name]()]


def stream_request(index: int, num_tokens: int, **options: object) -> StreamRequest:
    """One stream of its own text: prompts share no prefix."""
    prompt = [1 + (index * PROMPT_TOKENS + offset) % 100_000 for offset in range(PROMPT_TOKENS)]
    fixed = {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0, "seed": 1000 + index}
    return StreamRequest(prompt, fixed | options)


class _Suite:
    """The rows, each with processes of its own."""

    def __init__(self, tokenizer_dir: Path, quick: bool) -> None:
        self._tokenizer_dir = tokenizer_dir
        self._num_runs = NUM_QUICK_RUNS if quick else NUM_RUNS
        self._num_tokens = NUM_QUICK_TOKENS if quick else NUM_TOKENS
        self._row = partial(Row, suite=SUITE, origin=Origin(), quick=quick, simulated=True)

    def sync(self) -> list[Row]:
        """Row 7."""
        return self._efficiency(7, f"{PAIR},predraft=off", 0, required=0.95)

    def predrafted(self) -> list[Row]:
        """Row 8."""
        return [row for delay_ms in DELAYS_MS for row in self._efficiency(8, PAIR, delay_ms, required=0.90)]

    def predrafted_against_sync(self) -> list[Row]:
        """Measure row 9 and return it with the gammas it was measured at."""
        models = {"predrafted": PAIR, "sync": f"{PAIR},predraft=off"}
        gammas = {name: best_gamma(simulated_pair(model)) for name, model in models.items()}
        with contextlib.ExitStack() as stack:
            systems = {
                name: stack.enter_context(self._stream(model, gamma=gammas[name])) for name, model in models.items()
            }
            runs = self._interleave("row 9", systems)
        rates = {name: [1 / run.steady_token_s() for run in done] for name, done in runs.items()}
        case = f"70B/1B, delay 0, gamma {gammas['predrafted']} against {gammas['sync']}"
        return [ratio_row(partial(self._row, case=case), rates, "predrafted", "sync", row=9, required=1.4)]

    def drifting(self) -> list[Row]:
        """Row 12, with and without pre-drafting."""
        rows = []
        for name, dial in (("sync", ",predraft=off"), ("predrafted", "")):
            model = f"{PAIR},{DRIFT},stretch={self._num_tokens // 3}{dial}"
            gammas: dict[str, int | None] = {f"gamma {gamma}": gamma for gamma in FIXED_GAMMAS} | {AUTO: None}
            with self._stream(model) as measure:
                systems = {label: partial(measure, gamma=gamma) for label, gamma in gammas.items()}
                runs = self._interleave(f"row 12 {name}", systems)
            rates = {label: [1 / run.steady_token_s() for run in done] for label, done in runs.items()}
            row = partial(self._row, case=f"70B/1B, alpha 0.9, 0.4, 0.9, {name}")
            rows += [best_row(row, rates, AUTO, row=12, required=0.95), *rate_rows(row, rates)]
        return rows

    def long_prompt(self) -> list[Row]:
        """Return what a long prompt does to running streams."""
        return measure_long_prompt(self._tokenizer_dir, stream_request, self._num_runs, self._row)

    def _efficiency(self, number: int, model: str, delay_ms: int, required: float) -> list[Row]:
        pair = simulated_pair(model)
        name = "predrafted" if pair.predrafts else "sync"
        ideal_s = ideal_round_s(pair, GAMMA, delay_ms / 1e3)
        echo_us: dict[str, list[float]] = {carrier: [] for carrier in CARRIERS}
        with self._stream(f"{model},delay_ms={delay_ms / 4}", gamma=GAMMA) as measure, Echoes() as echoes:

            def measure_beside_echoes(index: int) -> StreamRun:
                for carrier, figures in echo_us.items():
                    figures.append(2 * echoes.round_trip_s(carrier, _IDLE_S) * 1e6)
                return measure(index)

            runs = self._interleave(f"row {number}, {delay_ms} ms", {name: measure_beside_echoes})[name]
        round_s = [run.steady_round_s() for run in runs]
        ratio = median_ratio([ideal_s] * len(round_s), round_s)
        row = partial(self._row, case=f"70B/1B, gamma {GAMMA}, 1 stream, delay {delay_ms} ms", system=name)
        if pair.predrafts:
            row = partial(row, x=delay_ms, x_name="delay_ms")
        return [
            row(
                row=number, metric="orchestration_efficiency", unit="ideal/measured", ratio_to="ideal",
                required=required, **ratio.fields,
            ),
            *self._beside_bare(row, number, "time_above_ideal_ratio", [(time_s - ideal_s) * 1e6 for time_s in round_s],
                               {f"two bare {_BARE_NAMES[carrier]}": figures for carrier, figures in echo_us.items()}),
            row(metric="round_ms", value=float(np.median(round_s)) * 1e3, unit="ms"),
            row(metric="ideal_round_ms", value=ideal_s * 1e3, unit="ms"),
        ]  # fmt: skip

    def _beside_bare(
        self, row: Callable[..., Row], number: int, metric: str, ours_us: list[float], bare_us: dict[str, list[float]]
    ) -> list[Row]:
        """Return pairs of (our time, lower bound) by name, in microseconds, one pair a run."""
        rows = []
        for name, figures in bare_us.items():
            ratio = median_ratio(ours_us, figures)
            rows += [
                row(row=number, metric=metric, unit="x", ratio_to=name, at_most=_MOST_BESIDE_BARE, **ratio.fields),
                row(system=name, metric="bare_us", value=float(np.median(figures)), unit="us"),
            ]
        return rows

    @contextlib.contextmanager
    def _stream(self, model: str, **fixed: object) -> Iterator[Callable[..., StreamRun]]:
        """A system of its own, warm; yields what runs one stream by its index."""
        with (
            redis_server() as redis_url,
            ProcessSystem(self._tokenizer_dir, simulated_replicas(model), redis_url=redis_url) as system,
            StreamProcess(system.endpoint) as client,
        ):

            def measure(index: int, **options: object) -> StreamRun:
                return client.run([stream_request(index, self._num_tokens, **(fixed | options))])[0]

            measure(10_000)
            yield measure

    def _interleave(self, label: str, systems: dict[str, Measure]) -> dict[str, list[StreamRun]]:
        return take_turns(label, systems, range(self._num_runs))
