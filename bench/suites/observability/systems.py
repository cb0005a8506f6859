"""What counting, auditing, tracing and scraping cost. Part of the suite `observability`, which calls this.

- `measure_metrics`: the time inside the calls that count metrics, as a share of the time of the rounds in which they
  are made. The services run under `calls`. The calls of all services count as if each delayed the round, although some
  of them run at the same time.
- `measure_systems`: tokens a second of coordinators that differ in their audits or traces alone, and of one that is
  scraped. All share one target and one draft and take turns, so one machine's drift meets all of them.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.line_child import LineChild
from bench.harness.pairs import interleave, median_ratio, rate_rows, ratio_row
from bench.harness.report import progress
from bench.harness.rows import Row
from bench.harness.streams import StreamProcess, tokens_per_s
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
from specdec.cli.metrics_page import read_page
from specdec.settings.coordinator import CoordinatorSettings
from specdec.supervision.processes import free_ports

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
                    batches.append(_counted_batch(clients, folder, prompts.batch(num_streams)))
                    advance()
                rows += metrics_rows(partial(row, case=case_of(pair, num_streams)), batches[1:])
    return rows


def _counted_batch(clients: StreamProcess, folder: Path, prompts: Sequence[list[int]]) -> CountedBatch:
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
            system=f"metrics{_IN_PROCESS}", metric="share_of_round", unit="of the time", at_most=MOST_COST,
            **share.fields,
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


PLAIN = "no audit, no traces"
SCRAPED = "scraped 10 times a second"
AUDITED, AUDITED_EVERY = "audit, default share", "audit of every round"
UNTRACED, TRACED = "traces on, none recorded", "traces on, all recorded"
SYSTEMS = (PLAIN, SCRAPED, AUDITED, AUDITED_EVERY, UNTRACED, TRACED)
_SCRAPE_S, _USUAL_SCRAPE_S = 0.1, 15.0
#: An audit that waits begins as soon as its target is idle, so a longer silence says that none waits.
_SILENCE_S = 0.05


@dataclass(frozen=True)
class ObservedBatch:
    """One batch of streams of one system."""

    tokens_per_s: float
    num_rounds: int
    num_audited: float = 0.0
    """Rounds of the batch that were audited before its last stream ended."""


@dataclass(frozen=True)
class _System:
    """One side of the comparison."""

    clients: StreamProcess
    metrics: Sequence[str]
    """Metrics addresses: the coordinator's, then the replicas'."""

    def total(self, name: str, **labels: str) -> float:
        page = read_page(self.metrics[0])
        if page is None:
            raise RuntimeError(f"the coordinator at {self.metrics[0]} does not tell its metrics")
        return page.total(name, **labels) or 0.0

    def num_audited(self) -> float:
        return self.total("audit_rounds_total")

    def settle(self) -> None:
        """Wait until no audit waits, so that none runs in the next batch."""
        seen, now = -1.0, 0.0
        while now != seen:
            seen = now
            time.sleep(_SILENCE_S)
            now = self.num_audited() + self.total("audit_rounds_dropped_total")


def measure_systems(pair: str, target: Path, num_runs: Mapping[int, int], row: Callable[..., Row]) -> list[Row]:
    """Return tokens a second of each system and their ratios to the plain one.

    Args:
        pair: name of the pair of models.
        target: its target; the draft is the demo pair's.
        num_runs: interleaved runs of each system by number of streams.
        row: makes a row of the suite.
    """
    rows: list[Row] = []
    prompts = OwnPrompts(prompt_token_ids(target, PROMPT_TOKENS))
    total = len(SYSTEMS) * (sum(num_runs.values()) + len(num_runs))
    with _running(target) as systems, progress(f"audit and traces, {pair}", total) as advance:
        for num_streams, number in num_runs.items():
            runs = {name: partial(_batch, name, system, num_streams, prompts) for name, system in systems.items()}
            interleave(range(1), runs, advance)  # warms caches
            batches = interleave(range(number), runs, advance)
            rows += system_rows(partial(row, case=case_of(pair, num_streams)), batches)
    return rows


@contextmanager
def _running(target: Path) -> Iterator[dict[str, _System]]:
    with ExitStack() as stack:
        collector = stack.enter_context(LineChild("bench.harness.trace_receiver", num_threads=1)).greeting
        own = _coordinator_arguments(collector)
        addresses = [f"127.0.0.1:{port}" for port in free_ports(len(own) + 2)]
        of_replicas, of_coordinators = addresses[:2], dict(zip(own, addresses[2:], strict=True))
        flags = [[*arguments, "--metrics", of_coordinators[name]] for name, arguments in own.items()]
        system = ProcessSystem(
            target,
            model_replicas(target, [("--metrics", address) for address in of_replicas]),
            coordinator_arguments=flags[0],
            more_coordinators=flags[1:],
            environ=service_environ(),
        )
        endpoints = dict(zip(own, stack.enter_context(system).endpoints, strict=True))
        made = {
            name: _System(stack.enter_context(StreamProcess(endpoints[name])), [of_coordinators[name], *of_replicas])
            for name in own
        }
        yield {name: made[PLAIN if name == SCRAPED else name] for name in SYSTEMS}


def _coordinator_arguments(collector: str) -> dict[str, list[str]]:
    """Return the flags in which the coordinators differ."""
    default = CoordinatorSettings.model_fields["audit_share"].default
    shares = {PLAIN: 0.0, AUDITED: default, AUDITED_EVERY: 1.0, UNTRACED: 0.0, TRACED: 0.0}
    traces = {
        name: ["--otlp-endpoint", collector, "--trace-share", str(share)]
        for name, share in ((UNTRACED, 0), (TRACED, 1))
    }
    return {name: ["--audit-share", str(share), *traces.get(name, [])] for name, share in shares.items()}


def _batch(name: str, system: _System, num_streams: int, prompts: OwnPrompts, _index: int) -> ObservedBatch:
    audited_before = system.num_audited()
    asked = requests(prompts.batch(num_streams))
    with _scraping(system.metrics) if name == SCRAPED else nullcontext():
        runs = system.clients.run(asked)
    num_audited = system.num_audited() - audited_before
    if name == AUDITED_EVERY:
        system.settle()
    return ObservedBatch(tokens_per_s(runs), sum(run.stats["num_rounds"] for run in runs), num_audited)


@contextmanager
def _scraping(addresses: Sequence[str]) -> Iterator[None]:
    """Read all addresses every `_SCRAPE_S`, the first time at once."""
    ended = threading.Event()

    def scrape() -> None:
        while True:
            for address in addresses:
                read_page(address)
            if ended.wait(_SCRAPE_S):
                return

    thread = threading.Thread(target=scrape, name="scraper")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def system_rows(row: Callable[..., Row], batches: Mapping[str, Sequence[ObservedBatch]]) -> list[Row]:
    """Return the rows of one case."""
    rates = {name: [batch.tokens_per_s for batch in done] for name, done in batches.items()}
    rows = [
        ratio_row(row, rates, name, PLAIN, required=1.0 - MOST_COST if name == AUDITED else None)
        for name in SYSTEMS[1:]
    ]
    audited = sum(each.num_audited for each in batches[AUDITED_EVERY])
    share_audited = audited / sum(each.num_rounds for each in batches[AUDITED_EVERY])
    rows.append(row(system=AUDITED_EVERY, metric="share_audited", value=share_audited, unit="of the rounds"))
    default = CoordinatorSettings.model_fields["audit_share"].default
    if share_audited:
        rows.append(_bound(row, AUDITED, "cost_share", default / share_audited, rates[AUDITED_EVERY], rates[PLAIN]))
    usual = _SCRAPE_S / _USUAL_SCRAPE_S
    rows.append(_bound(row, "scraped every 15 s", "cost_share", usual, rates[SCRAPED], rates[PLAIN]))
    return rows + rate_rows(row, rates)


def _bound(
    row: Callable[..., Row], system: str, metric: str, share: float, rates: Sequence[float], plain: Sequence[float]
) -> Row:
    """Return the cost of `share` of the work that made `plain` rates into `rates`."""
    slower = median_ratio(plain, rates)
    value, low, high = (share * (each - 1.0) for each in (slower.median, slower.low, slower.high))
    return row(
        system=system, metric=metric, value=value, unit="of the time", low=low, high=high,
        num_pairs=slower.num_pairs, at_most=MOST_COST,
    )  # fmt: skip
