"""Tokens a second of coordinators that differ in their audits or traces alone, and of one that is scraped.

All coordinators share one target and one draft and take turns, so nothing else differs and one machine's drift meets
all of them. Part of the suite `observability`, which calls this.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.line_child import LineChild
from bench.harness.pairs import interleave, median_ratio
from bench.harness.report import progress
from bench.harness.rows import Row
from bench.harness.streams import StreamProcess, tokens_per_s
from bench.harness.workload import OwnPrompts, prompt_token_ids
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
    rows = []
    for name in SYSTEMS[1:]:
        ratio = median_ratio(rates[name], rates[PLAIN])
        rows.append(
            row(
                system=name, metric="tokens_per_s_ratio", value=ratio.median, unit="x", ratio_to=PLAIN, low=ratio.low,
                high=ratio.high, num_pairs=ratio.num_pairs, required=1.0 - MOST_COST if name == AUDITED else None,
            )
        )  # fmt: skip
    audited = sum(each.num_audited for each in batches[AUDITED_EVERY])
    share_audited = audited / sum(each.num_rounds for each in batches[AUDITED_EVERY])
    rows.append(row(system=AUDITED_EVERY, metric="share_audited", value=share_audited, unit="of the rounds"))
    default = CoordinatorSettings.model_fields["audit_share"].default
    if share_audited:
        rows.append(_bound(row, AUDITED, "cost_share", default / share_audited, rates[AUDITED_EVERY], rates[PLAIN]))
    usual = _SCRAPE_S / _USUAL_SCRAPE_S
    rows.append(_bound(row, "scraped every 15 s", "cost_share", usual, rates[SCRAPED], rates[PLAIN]))
    return rows + [
        row(system=name, metric="tokens_per_s", value=float(np.median(measured)), unit="tokens/s")
        for name, measured in rates.items()
    ]


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
