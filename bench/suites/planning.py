"""Suite `planning`: what `specdec plan` calculates for a load, beside the live system under that load.

Real processes around simulated engines, whose step times the plan knows exactly, so that only its model of rounds,
waiting and batches is compared. Requests arrive at random at a fixed rate. The times outside the steps, which a plan
takes from one H100, are measured here with one stream.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.report import progress
from bench.harness.rows import Origin, Row
from bench.harness.scrape import total
from bench.harness.streams import StreamProcess, StreamRequest, StreamRun
from bench.systems.simulated import ProcessSystem, ReplicaCommand, write_tokenizer
from specdec.cli.planning.steady_state import CallTimes, Requests, SteadyState, steady_state
from specdec.engine.simulated.device import ModelledTime
from specdec.engine.simulated.simulated_pair import SimulatedPair, simulated_pair
from specdec.supervision.processes import free_ports

SUITE = "planning"
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
SECONDS, QUICK_SECONDS = 60.0, 10.0
NUM_LONE, NUM_QUICK_LONE = 16, 3
MOST_ERROR, MOST_BUSY_ERROR = 0.1, 0.1
_WARM_STREAMS = 4


@dataclass(frozen=True)
class PairLoads:
    """A pair and its loads."""

    name: str
    gamma: int
    rates_per_s: tuple[float, ...]
    """Requests a second. At the last one the target is busy for nine tenths of the time, or the two cores are."""

    @property
    def pair(self) -> SimulatedPair:
        return simulated_pair(self.model)

    @property
    def model(self) -> str:
        return f"simulated:{self.name},predraft=off"


PAIRS = (
    PairLoads("70b-1b", 4, (1.5, 3.5, 5.0)),
    PairLoads("32b-0.6b", 3, (3.0, 5.0, 7.0)),
    PairLoads("8b-0.6b", 3, (3.0, 6.0, 9.0)),
)


@dataclass(frozen=True)
class _Steps:
    """Step times of a simulated engine, as a plan asks for them. Implements `StepModel`."""

    forward: ModelledTime

    def step_s(self, num_sequences: float, num_rows: float, context_tokens: float) -> float:
        """See `StepModel.step_s`; the context costs nothing."""
        return self.forward.fixed_s + self.forward.per_token_s * num_sequences * num_rows


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; print nothing but progress."""
    row = partial(Row, suite=SUITE, origin=Origin(), quick=arguments.quick, simulated=True)
    num_loads = sum(len(each.rates_per_s) for each in PAIRS)
    with (
        tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder,
        progress(SUITE, num_loads + len(PAIRS)) as advance,
    ):
        tokenizer = write_tokenizer(Path(folder))
        return [
            made for loads in PAIRS for made in _measure_pair(loads, tokenizer, row, advance, quick=arguments.quick)
        ]


def _measure_pair(
    loads: PairLoads, tokenizer: Path, row: Callable[..., Row], advance: Callable[[], None], *, quick: bool
) -> list[Row]:
    metrics = {role: f"127.0.0.1:{port}" for role, port in zip(("target", "draft"), free_ports(2), strict=True)}
    replicas = [ReplicaCommand.serving(role, loads.model, "--metrics", address) for role, address in metrics.items()]
    rows = []
    with ProcessSystem(tokenizer, replicas) as system, StreamProcess(system.endpoint) as clients:
        clients.run([_request(number, loads.gamma) for number in range(_WARM_STREAMS)])
        calls = _call_times(loads, clients, NUM_QUICK_LONE if quick else NUM_LONE)
        advance()
        for rate_per_s in loads.rates_per_s:
            arrivals = _arrivals(rate_per_s, QUICK_SECONDS if quick else SECONDS)
            busy, began_s = _busy_s(metrics), time.monotonic()
            first = round(1_000_000 * rate_per_s)
            runs = clients.run([_request(first + number, loads.gamma, at_s) for number, at_s in enumerate(arrivals)])
            seconds = time.monotonic() - began_s
            shares = {role: (after - busy[role]) / seconds for role, after in _busy_s(metrics).items()}
            rate = len(arrivals) / seconds
            rows += _rows(partial(row, case=f"{loads.name}, {rate_per_s:g} requests/s"), runs, shares,
                          _planned(loads, calls, rate, runs))  # fmt: skip
            advance()
    return rows


def _request(number: int, gamma: int, offset_s: float = 0.0) -> StreamRequest:
    prompt = random.Random(number).choices(range(5, 2000), k=PROMPT_TOKENS)
    options = {
        "max_new_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True, "gamma": gamma, "seed": number
    }  # fmt: skip
    return StreamRequest(prompt, options, offset_s)


def _arrivals(rate_per_s: float, seconds: float) -> list[float]:
    """Return the times of a Poisson process."""
    source, now_s, times = random.Random(round(100 * rate_per_s)), 0.0, []
    while (now_s := now_s + source.expovariate(rate_per_s)) < seconds:
        times.append(now_s)
    return times


def _call_times(loads: PairLoads, clients: StreamProcess, num_streams: int) -> CallTimes:
    """Return the times outside the steps, from streams that run alone, without drafts and with them."""
    pair, gamma = loads.pair, loads.gamma
    alone = [clients.run([_request(1_000 + number, 0)])[0] for number in range(num_streams)]
    drafted = [clients.run([_request(2_000 + number, gamma)])[0] for number in range(num_streams)]
    target_s = float(np.median([each.steady_round_s() for each in alone])) - pair.target.step_s(1)
    round_s = float(np.median([each.steady_round_s() for each in drafted]))
    draft_s = round_s - pair.verify_s(gamma) - gamma * pair.draft_step_s() - target_s
    calls = CallTimes(target_s, draft_s, opening_s=0.0)
    lone = _planned(loads, calls, 0.0, drafted)
    return CallTimes(target_s, draft_s, float(np.median([each.ttft_s for each in drafted])) - lone.ttft_s)


def _planned(loads: PairLoads, calls: CallTimes, rate_per_s: float, runs: Sequence[StreamRun]) -> SteadyState:
    """Return what the plan says; the tokens of a round are those of the runs, as with `specdec plan --measured`."""
    num_accepted = sum(each.stats["num_accepted_tokens"] for each in runs)
    tokens_per_round = 1.0 + num_accepted / sum(each.stats["num_rounds"] for each in runs)
    requests = Requests(rate_per_s, PROMPT_TOKENS, OUTPUT_TOKENS, loads.gamma, tokens_per_round)
    target, draft = _Steps(loads.pair.target), _Steps(loads.pair.draft)
    state = steady_state(requests, calls, target, draft, 1, 1)
    if state is None:
        raise RuntimeError(f"{loads.name} cannot serve {rate_per_s:g} requests/s")
    return state


def _busy_s(metrics: dict[str, str]) -> dict[str, float]:
    return {role: total(address, "specdec:busy_seconds_total") for role, address in metrics.items()}


def _rows(
    row: Callable[..., Row], runs: Sequence[StreamRun], shares: dict[str, float], planned: SteadyState
) -> list[Row]:
    tokens_per_s = 1 / float(np.mean([each.tpot_s for each in runs]))
    ttft_s = float(np.median([each.ttft_s for each in runs]))
    busy = {"target": planned.target_busy_share, "draft": planned.draft_busy_share}
    limits = {"required": 1 - MOST_ERROR, "at_most": 1 + MOST_ERROR, "ratio_to": "live system"}
    return [
        row(system="specdec plan", metric="tokens_per_s_ratio", value=1 / planned.tpot_s / tokens_per_s, unit="x",
            **limits),
        row(system="specdec plan", metric="ttft_p50_ratio", value=planned.ttft_s / ttft_s, unit="x", **limits),
        *(
            row(system="specdec plan", metric=f"{role}_busy_error", value=abs(busy[role] - share), unit="",
                ratio_to="live system", at_most=MOST_BUSY_ERROR)
            for role, share in shares.items()
        ),
        row(system="live system", metric="tokens_per_s", value=tokens_per_s, unit="tokens/s"),
        row(system="live system", metric="ttft_ms_p50", value=1e3 * ttft_s, unit="ms"),
        *(row(system="live system", metric=f"{role}_busy", value=share, unit="") for role, share in shares.items()),
    ]  # fmt: skip
