"""Measure a draft pool that its own signals take from one replica to none and back, and what streams notice.

Real processes around simulated engines. Their metrics are scraped as Prometheus would, the queries of the ScaledObject
in k8s/components/keda are evaluated on them, and the rules of KEDA and of the HorizontalPodAutoscaler decide. Only the
time without activity after which the last draft ends is shorter than in the manifest. Part of the suite `elastic`.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from bench.harness.pairs import ratio_row
from bench.harness.report import waiting
from bench.harness.rows import Row
from bench.harness.scrape import scrape
from bench.harness.steady_load import SteadyLoad
from bench.harness.streams import StreamProcess, StreamRequest, StreamRun, tokens_per_s
from bench.systems.simulated import ProcessSystem, ReplicaCommand
from k8s.simulation.keda import KedaRule
from k8s.simulation.manifests import Autoscaler, keda_autoscalers
from k8s.simulation.queries import evaluate
from k8s.simulation.scaling_rule import SYNC_S
from k8s.simulation.scraped import SCRAPE_INTERVAL_S, Scraped
from specdec.supervision.processes import free_ports

PAIR = "simulated:70b-1b"
NUM_STREAMS = 4
NUM_TOKENS = 96
LEAST_RATIO = 0.95
#: Instead of 600 s.
COOLDOWN_S = 60.0
_DRAFT, _OFF = "draft", "speculation off"
#: Longest time until a decision of the pool: the cooldown, a poll, and a minute that a rate looks back.
_PATIENCE_S = COOLDOWN_S + 180.0


class DraftScaler:
    """Scales the draft pool of a running system on a thread. Use by `with`."""

    def __init__(self, system: ProcessSystem, draft: str, metrics: Sequence[str], autoscaler: Autoscaler) -> None:
        """
        Args:
            system: it runs.
            draft: address of its only draft.
            metrics: HOST:PORT of the metrics of every service.
            autoscaler: of the draft pool.
        """
        self._system, self._draft, self._metrics = system, draft, metrics
        self._autoscaler, self._rule = autoscaler, KedaRule(autoscaler)
        self._scraped = Scraped()
        for name in ("target_only_steps_total", "call_latency_seconds_sum", "draft_late_total"):
            self._scraped.declare(f"specdec:{name}")
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scaler")
        self.num_replicas = 1
        """Replicas that serve."""
        self.decided_s: list[float] = []
        """Time of each change."""
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def wait_for(self, num_replicas: int) -> None:
        """Return once the pool has this size. Raises RuntimeError if it has not after `_PATIENCE_S`."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while self.num_replicas != num_replicas:
            if self.error is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the draft pool has {self.num_replicas} replicas") from self.error
            time.sleep(0.1)

    def _run(self) -> None:
        try:
            while not self._ends.wait(min(SCRAPE_INTERVAL_S, SYNC_S)):
                self._scrape()
                self._decide(time.monotonic())
        except Exception as error:  # shown by `wait_for`
            self.error = error

    def _scrape(self) -> None:
        for address in self._metrics:
            if address == self._metrics[0] and not self.num_replicas:
                continue
            now_s = time.monotonic()
            for sample in scrape(address):
                if sample.name in self._scraped:
                    self._scraped.add(now_s, sample.name, {**sample.labels, "pod": address}, sample.value)

    def _decide(self, now_s: float) -> None:
        totals = [self._total(signal.query, now_s) for signal in self._autoscaler.signals]
        wanted = min(1, self._rule.decide(now_s, self.num_replicas, totals))
        if wanted == self.num_replicas:
            return
        self.decided_s.append(now_s)
        if wanted:
            self._system.start_again([self._draft])
        else:
            self._system.child(self._draft).ask_to_stop()
            self._scraped.end(self._metrics[0])
        self.num_replicas = wanted

    def _total(self, query: str, now_s: float) -> float | None:
        values = evaluate(query, self._scraped, now_s)
        return sum(values.values()) if values else None


def measure_zero(tokenizer_dir: Path, row: Callable[..., Row]) -> list[Row]:
    """Return the rows. A run takes about four minutes, most of which are waits for the autoscaler.

    Args:
        tokenizer_dir: see `write_tokenizer`.
        row: makes a row of the suite.
    """
    metrics = [f"127.0.0.1:{port}" for port in free_ports(3)]
    replicas = [
        ReplicaCommand.serving(role, PAIR, "--metrics", address)
        for role, address in zip((_DRAFT, "target"), metrics, strict=False)
    ]
    autoscaler = replace(keda_autoscalers()[_DRAFT], cooldown_s=COOLDOWN_S)
    with (
        ProcessSystem(tokenizer_dir, replicas, coordinator_arguments=("--metrics", metrics[2])) as system,
        StreamProcess(system.endpoint) as clients,
    ):
        run = partial(_run, clients)
        before = run(0)
        with DraftScaler(system, system.addresses[0], metrics, autoscaler) as scaler:
            with waiting("one draft to none"), SteadyLoad(system.endpoint, NUM_STREAMS, gamma=0) as load:
                scaler.wait_for(0)
                load.wait_for_all_streams()
            with waiting("no draft to one"):
                began_s = time.monotonic()
                pairs = _pairs(run, scaler)
                scaler.wait_for(1)
                serving_after_s = time.monotonic() - began_s
            after = run(1)
    rates = {name: [tokens_per_s(pair[side]) for pair in pairs] for side, name in enumerate(("specdec", _OFF))}
    runs = [*before, *after, *(each for pair in pairs for batch in pair for each in batch)]
    num_failed = len(load.faults) + sum(each.num_tokens != NUM_TOKENS for each in runs)
    row = partial(row, case=f"70B/1B, {NUM_STREAMS} streams, drafts 1 to 0 to 1", system="specdec")
    note = f"of {len(runs) + sum(load.outputs_ended)}; the cooldown is {COOLDOWN_S:g} s instead of 600 s"
    return [
        row(metric="streams_failed", value=float(num_failed), unit="streams", at_most=0.0, note=note),
        ratio_row(row, rates, "specdec", _OFF, required=LEAST_RATIO, note="without a draft replica"),
        row(metric="draft_serves_after", value=serving_after_s, unit="s", note="from the first round that wants it"),
        row(metric="draft_tokens_before", value=_draft_tokens(before), unit="per round"),
        row(metric="draft_tokens_after", value=_draft_tokens(after), unit="per round"),
    ]


def _run(clients: StreamProcess, index: int, gamma: int | None = None) -> list[StreamRun]:
    """Run a batch of streams; `gamma` None: chosen by the coordinator."""
    options = {"max_new_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, "gamma": gamma}
    rng = random.Random(index)
    prompts = [rng.choices(range(5, 2000), k=16) for _ in range(NUM_STREAMS)]
    return clients.run([StreamRequest(prompt, options) for prompt in prompts])


def _pairs(run: Callable[..., list[StreamRun]], scaler: DraftScaler) -> list[tuple[list[StreamRun], list[StreamRun]]]:
    """Return batches that want drafts and batches that do not, by turns, until the scaler decides to start a draft."""
    pairs: list[tuple[list[StreamRun], list[StreamRun]]] = []
    num_decided = len(scaler.decided_s)
    while True:
        first = len(pairs) % 2
        batches = [run(100 + len(pairs), gamma) for gamma in ((0, None) if first else (None, 0))]
        if len(scaler.decided_s) > num_decided:
            return pairs
        pairs.append((batches[first], batches[1 - first]))


def _draft_tokens(runs: Sequence[StreamRun]) -> float:
    num_draft_tokens = sum(run.stats["num_draft_tokens"] for run in runs)
    return float(num_draft_tokens / sum(run.stats["num_rounds"] for run in runs))
