"""Exports the counters of a simulated system under the names and labels of the services' metrics."""

from __future__ import annotations

from collections.abc import Iterator

from k8s.simulation.pools import Coordinator, Draft, Replica, System, Target
from k8s.simulation.scraped import Labels, Scraped

_REPLICA_SERIES = (
    "specdec:num_requests_waiting", "specdec:num_requests_running", "specdec:kv_cache_usage_perc",
    "specdec:busy_seconds_total", "specdec:call_latency_seconds_sum", "specdec:call_latency_seconds_count",
)  # fmt: skip
_COORDINATOR_SERIES = (
    "specdec:num_requests_running", "specdec:event_loop_lag_seconds_sum", "specdec:event_loop_lag_seconds_count",
    "process_cpu_seconds_total", "specdec:num_requests_queued",
    "specdec:target_only_steps_total", "specdec:draft_late_total",
)  # fmt: skip
SIMULATED_SERIES = frozenset((*_REPLICA_SERIES, *_COORDINATOR_SERIES))


def new_scraped() -> Scraped:
    """Return a store that knows every simulated series, without a sample."""
    scraped = Scraped()
    for name in SIMULATED_SERIES:
        scraped.declare(name)
    return scraped


def scrape(system: System, scraped: Scraped) -> None:
    """Add a sample of every series of every pod, also of those that load."""
    now_s = system.env.now
    for pods, role in ((system.targets, "target"), (system.drafts, "draft")):
        for pod in pods:
            labels = {"deployment": role, "pod": pod.name, "role": role, "pool": "default"}
            _add(scraped, now_s, labels, _replica_values(system, pod, now_s))
    for coordinator in system.coordinators:
        labels = {"deployment": "coordinator", "container": "coordinator", "pod": coordinator.name}
        _add(scraped, now_s, labels, _coordinator_values(coordinator))
    for round_labels, name, value in _round_counts(system):
        scraped.add(now_s, name, round_labels, value)


def _add(scraped: Scraped, now_s: float, labels: Labels, values: dict[str, float]) -> None:
    for name, value in values.items():
        scraped.add(now_s, name, labels, value)


def _replica_values(system: System, pod: Replica, now_s: float) -> dict[str, float]:
    waiting = len(pod.waiting) + len(pod.prompts) if isinstance(pod, Target) else 0
    busy_s = pod.busy_until(now_s) if isinstance(pod, Draft) else pod.busy_s
    kv_share = _kv_share(system, pod) if isinstance(pod, Target) else 0.0
    values = (waiting, pod.num_calls - waiting, kv_share, busy_s, pod.call_seconds, pod.num_answered)
    return dict(zip(_REPLICA_SERIES, map(float, values), strict=True))


def _kv_share(system: System, pod: Target) -> float:
    model, load = system.workload.deployment.target, system.workload.load
    return pod.num_streams * load.context_tokens * model.kv_bytes_per_token / model.kv_bytes


def _coordinator_values(pod: Coordinator) -> dict[str, float]:
    values = (pod.num_streams, pod.lag_sum_s, pod.lag_count, pod.cpu_s, pod.num_assigned - pod.num_streams)
    return dict(zip(_COORDINATOR_SERIES, map(float, values), strict=False))


def _round_counts(system: System) -> Iterator[tuple[Labels, str, float]]:
    """Yield the counts of rounds of all coordinators together."""
    pool = {"deployment": "coordinator", "pod": "all", "pool": "default"}
    yield {**pool, "cause": "no_replica"}, "specdec:target_only_steps_total", float(system.num_target_only)
    yield pool, "specdec:draft_late_total", float(system.num_late)
