"""Rows of the suite `autoscaling`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from bench.harness.rows import Row
from k8s.simulation.cluster import POOLS, Cluster, History
from k8s.simulation.limits import breaks_at, resources
from k8s.simulation.manifests import Autoscaler, hpa_autoscalers, keda_autoscalers
from k8s.simulation.outcomes import Planner, held, largest_difference, num_reversals, share_within_one
from k8s.simulation.pools import Workload
from k8s.simulation.redis_costs import measure_redis
from k8s.simulation.scenarios import RATE_PER_S, SEED, llama_pair, pods_at, run_trace
from k8s.simulation.sizing import SIZED_LOADS
from k8s.simulation.traces import Trace, ramp, steady, step

GOODPUT_RATES = (5, 10, 15, 20, 22.5, 25, 30, 35, 40)
#: Numbers of replicas beside which the signals of a pool are shown.
SIGNAL_REPLICAS = {"target": (2, 3, 4), "draft": (1, 2, 4)}
LARGE_RATES = (10, 100, 1_000, 10_000)
STEP = step(RATE_PER_S, 2 * RATE_PER_S, (3, 8, 15))
SMALL_STEP = step(RATE_PER_S, 1.5 * RATE_PER_S, (3, 6, 1))
RAMP = ramp(RATE_PER_S / 2, 2 * RATE_PER_S, (3, 7, 3, 7, 14))
#: Load, none for longer than KEDA's cooldown, load again.
PAUSE = Trace("2/s, 20 minutes of nothing, 2/s", ((0, 2), (300, 2), (301, 0), (1500, 0), (1501, 2), (2100, 2)))
_HPA, _KEDA = "HPA", "KEDA"
_MINUTES_PER_POINT = 2

MakeRow = Callable[..., Row]


def goodput_rows(row: MakeRow, quick: bool) -> list[Row]:
    """Return the requests per second that hold the limits, by load, on the pods that are planned for 20/s."""
    planned = Planner(llama_pair(RATE_PER_S)).replicas(RATE_PER_S)
    rows = []
    for rate in GOODPUT_RATES[:: 4 if quick else 1]:
        seconds = 30 if quick else 120
        workload, history = run_trace(steady(float(rate), seconds), {}, planned)
        goodput = held(history, workload).both * history.num_arrived / seconds
        rows.append(
            row(
                case="Llama 3.1 8B with 1B on H100", system=f"pods planned for {RATE_PER_S:g}/s", metric="goodput_rps",
                value=goodput, unit="requests/s", x=float(rate), x_name="requests_per_s", simulated=True,
            )
        )  # fmt: skip
    return rows


def signal_rows(row: MakeRow, quick: bool) -> list[Row]:
    """Return the signals of targets and drafts at one load, by the number of replicas."""
    workload, seconds, rows = llama_pair(RATE_PER_S), 30.0 if quick else 120.0, []
    for pool, numbers in SIGNAL_REPLICAS.items():
        for number in numbers:
            replicas = {"target": 2, "draft": 1, "coordinator": 6, pool: number}
            cluster = Cluster(workload, replicas, {}, {}, SEED)
            cluster.run(steady(RATE_PER_S, seconds))
            pods = cluster.system.targets if pool == "target" else cluster.system.drafts
            calls = [pod.call_seconds / seconds for pod in pods]
            values = {f"{pool}_calls": sum(calls), f"{pool}_roots_of_calls": sum(map(math.sqrt, calls))}
            rows += [
                row(
                    case=f"{RATE_PER_S:g} requests/s", system="all replicas", metric=metric, value=value, unit="calls",
                    x=float(number), x_name="replicas", simulated=True,
                )
                for metric, value in values.items()
            ]  # fmt: skip
    return rows


def trace_rows(row: MakeRow, quick: bool) -> list[Row]:
    """Return what each trace gave under each kind of autoscaler."""
    runs: list[tuple[str, Trace, str, Mapping[str, Autoscaler]]] = [("", SMALL_STEP, _HPA, hpa_autoscalers())]
    if not quick:
        runs += [
            ("step", STEP, _HPA, hpa_autoscalers()),
            ("ramp", RAMP, _HPA, hpa_autoscalers()),
            ("", STEP, _KEDA, keda_autoscalers()),
        ]
    planner = Planner(llama_pair(RATE_PER_S))
    rows: list[Row] = []
    for name, trace, kind, autoscalers in runs:
        workload, history = run_trace(trace, autoscalers)
        make = partial(row, case=trace.name, simulated=True)
        rows += _outcome_rows(partial(make, system=kind), workload, history, trace, planner)
        if name:
            rows += _replica_rows(make, name, kind, history, trace, planner)
    return rows


def _outcome_rows(row: Any, workload: Workload, history: History, trace: Trace, planner: Planner) -> Iterator[Row]:
    shares, limits = held(history, workload), workload.load
    yield row(metric="slo_held", value=100 * shares.both, unit="% of requests")
    yield row(metric=f"ttft_within_{limits.ttft_s * 1e3:g}_ms", value=100 * shares.ttft, unit="% of requests")
    yield row(metric=f"tpot_within_{limits.tpot_s * 1e3:g}_ms", value=100 * shares.tpot, unit="% of requests")
    yield row(metric="slo_missed_s", value=history.seconds_missed(limits.ttft_s, limits.tpot_s), unit="s")
    yield row(metric="refused", value=float(history.num_refused), unit="requests")
    for pool in POOLS:
        replicas, planned = history.replicas[pool], partial(_planned, planner, trace, pool)
        difference = largest_difference(replicas, planned)
        within = 100 * share_within_one(replicas, planned)
        yield row(metric=f"{pool}s_beside_plan", value=float(difference), unit="replicas", at_most=1.0)
        yield row(metric=f"{pool}s_within_one_of_plan", value=within, unit="% of the time")
        yield row(metric=f"{pool}_reversals", value=float(num_reversals(replicas)), unit="reversals", at_most=1.0)


def _planned(planner: Planner, trace: Trace, pool: str, at_s: float) -> int:
    return planner.replicas(trace.rate_per_s(at_s))[pool]


def _replica_rows(row: Any, name: str, kind: str, history: History, trace: Trace, planner: Planner) -> Iterator[Row]:
    """Yield the number of targets over time beside that of the plan."""
    points = history.replicas["target"]
    step_length = int(_MINUTES_PER_POINT * 60 / (points[1][0] - points[0][0]))
    for at_s, number in points[::step_length]:
        make = partial(row, metric=f"targets_{name}", unit="replicas", x=float(round(at_s / 60)), x_name="minutes")
        yield make(system=kind, value=float(number))
        yield make(system="specdec plan", value=float(_planned(planner, trace, "target", at_s)))


def size_rows(row: MakeRow, quick: bool) -> list[Row]:
    """Return the GPUs of plans for 50 requests a second, over those of the smallest simulated system that holds."""
    rows = []
    for name, sized in list(SIZED_LOADS.items())[: 1 if quick else None]:
        planned, least = sized.plan().num_gpus, sized.least_gpus()
        make: Any = partial(row, case=f"50 requests/s, {name} a token", system="specdec plan", simulated=True)
        rows += [
            make(metric="gpus", value=float(planned), unit="GPUs"),
            make(metric="gpus_over_least", value=planned / least, unit="x", required=1.0, at_most=1.1),
        ]
    return rows


def pause_rows(row: MakeRow, quick: bool) -> list[Row]:
    """Return the number of drafts before, in and after a pause, under KEDA's own signals."""
    _, history = run_trace(PAUSE, keda_autoscalers())
    ends_s = {"before": 300.0, "in": 1500.0, "after": PAUSE.end_s}
    make: Any = partial(row, case=PAUSE.name, system=_KEDA, simulated=True)
    rows = []
    for when, end_s in ends_s.items():
        number = [each for at_s, each in history.replicas["draft"] if at_s <= end_s][-1]
        wanted = 0.0 if when == "in" else 1.0
        rows.append(
            make(metric=f"drafts_{when}_pause", value=float(number), unit="replicas", required=wanted, at_most=wanted)
        )
    reversals = num_reversals(history.replicas["draft"])
    return [*rows, make(metric="draft_reversals", value=float(reversals), unit="reversals", at_most=1.0)]


def limit_rows(row: MakeRow, quick: bool) -> list[Row]:
    """Return what Redis costs, the loads at which parts break, and how much of each is used up to 10,000/s."""
    costs = measure_redis()
    make: Any = partial(row, case="Llama 3.1 8B with 1B on H100, one system")
    rows = [
        make(system="Redis", metric="commit_us", value=costs.commit_s * 1e6, unit="us"),
        make(
            system="Redis", metric="registry_read_us_per_replica", value=costs.read_s_per_replica * 1e6, unit="us"
        ),
    ]  # fmt: skip
    make = partial(make, simulated=True)
    for rate in LARGE_RATES:
        pods = pods_at(float(rate))
        at = partial(make, system="specdec plan", x=float(rate), x_name="sessions_per_s")
        rows += [
            at(metric="replicas", value=pods.replicas, unit="pods"),
            at(metric="coordinators", value=pods.coordinators, unit="pods"),
            at(metric="commits_per_s", value=pods.commits_per_s, unit="commits/s"),
        ]
    for resource in resources(costs):
        breaks = breaks_at(resource, pods_at)
        rows.append(make(system=resource.name, metric="breaks_at", value=breaks, unit="sessions/s"))
        for rate in LARGE_RATES:
            share = resource.share(pods_at(float(rate))) / resource.limit
            rows.append(
                make(
                    system=resource.name, metric="used_share", value=share, unit="of the limit", x=float(rate),
                    x_name="sessions_per_s",
                )
            )  # fmt: skip
    return rows
