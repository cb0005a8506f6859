"""Scenarios of the suite: the planned system, and runs of it under the autoscalers of the manifests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from k8s.simulation.cluster import Cluster, History
from k8s.simulation.limits import Pods
from k8s.simulation.manifests import Autoscaler
from k8s.simulation.outcomes import Planner
from k8s.simulation.pools import Workload
from k8s.simulation.sizing import LLAMA_1B, LLAMA_8B, workload_of
from k8s.simulation.traces import Trace
from specdec.cli.planning.deployment import ExpectedLoad
from specdec.cli.planning.search import best_deployment

SEED = 20
#: Rate of the plan that the simulated systems begin with.
RATE_PER_S = 20.0
ALPHA = 0.8
#: The number of pods at the begin of a trace leaves room until an autoscaler has added a pod.
_PEAK_FACTOR = 1.25
#: Limits of the first example of docs/how-to/size-a-system.md.
TTFT_S, TPOT_S = 1.0, 0.015
PROMPT_TOKENS, OUTPUT_TOKENS = 1000, 300
#: Rate at which numbers of pods are large enough that rounding them up changes little.
_LARGE_RATE_PER_S = 200.0
#: Default of `specdec plan --load-gb-per-s`.
_LOAD_BYTES_PER_S = 1e9


@cache
def llama_pair(rate_per_s: float) -> Workload:
    """Return the workload of Llama 3.1 8B with Llama 3.2 1B as its draft, each on an H100."""
    load = ExpectedLoad(rate_per_s, PROMPT_TOKENS, OUTPUT_TOKENS, TTFT_S, TPOT_S, peak_factor=_PEAK_FACTOR)
    return workload_of(load, ALPHA, best_deployment(load, ALPHA, LLAMA_8B, LLAMA_1B))


def load_times(workload: Workload) -> dict[str, float]:
    """Return the time in which a replica of each pool reads its weights."""
    models = {"target": workload.deployment.target, "draft": workload.deployment.draft}
    return {pool: model.weight_bytes / _LOAD_BYTES_PER_S for pool, model in models.items() if model is not None}


def pods_at(rate_per_s: float) -> Pods:
    """Return the pods that a load needs, in proportion to the plan of `_LARGE_RATE_PER_S`."""
    scale = rate_per_s / _LARGE_RATE_PER_S
    workload = llama_pair(_LARGE_RATE_PER_S)
    deployment, load = workload.deployment, workload.load
    replicas = deployment.num_targets + deployment.num_drafts
    commits_per_s = deployment.redis_writes_per_s(load)
    return Pods(scale * replicas, scale * deployment.num_coordinators(load), scale * commits_per_s)


def run_trace(
    trace: Trace, autoscalers: Mapping[str, Autoscaler], replicas: Mapping[str, int] | None = None, seed: int = SEED
) -> tuple[Workload, History]:
    """Serve a trace from the planned number of replicas on, or from `replicas`. Gamma is that of the plan for 20/s."""
    workload = llama_pair(RATE_PER_S)
    begin = replicas or Planner(workload).replicas(trace.points[0][1])
    cluster = Cluster(workload, begin, autoscalers, load_times(workload), seed)
    return workload, cluster.run(trace)
