"""Runs a simulated system under its autoscalers: arrivals, scrapes, decisions, and pods that start and end."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from simpy.events import Event

from k8s.simulation.keda import KedaRule
from k8s.simulation.manifests import Autoscaler
from k8s.simulation.metrics import new_scraped, scrape
from k8s.simulation.pools import Coordinator, Draft, Stream, System, Target, Workload
from k8s.simulation.queries import evaluate
from k8s.simulation.scaling_rule import SYNC_S, ScalingRule
from k8s.simulation.scraped import SCRAPE_INTERVAL_S
from k8s.simulation.traces import Trace

#: Time from a decision until a process reads its weights: scheduling, an image that the node has, imports. Assumed.
POD_START_S = 30.0
POOLS = ("target", "draft", "coordinator")


@dataclass(slots=True)
class Served:
    """A finished request."""

    arrived_s: float
    ttft_s: float
    tpot_s: float


@dataclass(slots=True)
class History:
    """Requests, replicas and signals of one run."""

    served: list[Served] = field(default_factory=list)
    num_arrived: int = 0
    num_refused: int = 0
    replicas: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: {pool: [] for pool in POOLS})
    """Number of replicas of each pool at each decision."""
    signals: dict[str, list[tuple[float, tuple[float | None, ...]]]] = field(
        default_factory=lambda: {pool: [] for pool in POOLS}
    )
    """Sum of each signal of each pool at each decision."""

    def seconds_missed(self, ttft_s: float, tpot_s: float) -> int:
        """Return the number of seconds in which most arriving requests missed a limit, refused ones left out."""
        missed: dict[int, list[bool]] = {}
        for each in self.served:
            missed.setdefault(int(each.arrived_s), []).append(each.ttft_s > ttft_s or each.tpot_s > tpot_s)
        return sum(sum(second) * 2 > len(second) for second in missed.values())


class Cluster:
    """One run."""

    def __init__(
        self,
        workload: Workload,
        replicas: Mapping[str, int],
        autoscalers: Mapping[str, Autoscaler],
        load_s: Mapping[str, float],
        seed: int,
    ) -> None:
        """
        Args:
            workload: requests and models.
            replicas: number of replicas by pool at the begin; they serve already.
            autoscalers: autoscaler by pool; a pool without one keeps its number.
            load_s: time in which a replica of a pool reads its weights.
            seed: of everything that is drawn.
        """
        self.history = History()
        self.system = System(workload, seed, self._note)
        self._workload = workload
        self._scraped = new_scraped()
        self._load_s = load_s
        self._scalers = {
            pool: (each, ScalingRule(each) if each.cooldown_s is None else KedaRule(each))
            for pool, each in autoscalers.items()
        }
        self._num_started = 0
        for pool, number in replicas.items():
            for _ in range(number):
                self._start(pool, 0.0)

    def run(self, trace: Trace) -> History:
        """Serve a trace, and the streams that run at its end for one more minute."""
        env = self.system.env
        env.process(self._arrivals(trace))
        env.process(self._scrapes())
        env.process(self._decisions())
        env.run(until=trace.end_s + 60.0)
        return self.history

    def _arrivals(self, trace: Trace) -> Generator[Event, Any, None]:
        for at_s in trace.arrivals(self.system.random):
            yield self.system.env.timeout(at_s - self.system.env.now)
            self.history.num_arrived += 1
            self.history.num_refused += not self.system.arrive()

    def _scrapes(self) -> Generator[Event, Any, None]:
        while True:
            scrape(self.system, self._scraped)
            yield self.system.env.timeout(SCRAPE_INTERVAL_S)

    def _decisions(self) -> Generator[Event, Any, None]:
        yield self.system.env.timeout(SYNC_S / 2)  # scrapes and decisions are not at one time
        while True:
            for pool in POOLS:
                self._decide(pool)
            yield self.system.env.timeout(SYNC_S)

    def _decide(self, pool: str) -> None:
        now_s, current = self.system.env.now, len(self._running(pool))
        if pool in self._scalers:
            scaler, rule = self._scalers[pool]
            totals = tuple(self._total(signal.query) for signal in scaler.signals)
            self.history.signals[pool].append((now_s, totals))
            wanted = rule.decide(now_s, current, totals)
            self._resize(pool, wanted - current)
        self.history.replicas[pool].append((now_s, len(self._running(pool))))

    def _total(self, query: str) -> float | None:
        values = evaluate(query, self._scraped, self.system.env.now)
        return sum(values.values()) if values else None

    # ---- pods ----

    def _pods(self, pool: str) -> list[Any]:
        pods: dict[str, list[Any]] = {
            "target": self.system.targets, "draft": self.system.drafts, "coordinator": self.system.coordinators
        }  # fmt: skip
        return pods[pool]

    def _running(self, pool: str) -> list[Target | Draft | Coordinator]:
        return [pod for pod in self._pods(pool) if not pod.is_leaving]

    def _resize(self, pool: str, change: int) -> None:
        for _ in range(change):
            self._start(pool, self.system.env.now + POD_START_S + self._load_s.get(pool, 0.0))
        for pod in self._running(pool)[change:] if change < 0 else ():
            self._end(pool, pod)

    def _start(self, pool: str, serving_s: float) -> None:
        self._num_started += 1
        name = f"{pool}-{self._num_started}"
        add = {"target": self.system.add_target, "draft": self.system.add_draft}.get(pool, self.system.add_coordinator)
        add(name, serving_s)

    def _end(self, pool: str, pod: Target | Draft | Coordinator) -> None:
        """Let a pod leave. Its calls go on to their end, and its series are no longer scraped."""
        pod.is_leaving = True
        self._pods(pool).remove(pod)
        self._scraped.end(pod.name)

    def _note(self, stream: Stream, ended_s: float) -> None:
        num_further = self._workload.load.output_tokens - 1
        tpot_s = (ended_s - stream.first_token_s) / num_further
        self.history.served.append(Served(stream.arrived_s, stream.first_token_s - stream.arrived_s, tpot_s))
