"""Calculates what breaks at large loads: processor time of coordinators, Redis and checks of replicas, from costs.

The costs of a coordinator and of Redis are measured. The numbers of pods are those of `specdec plan`. A check is one
`GetEngineInfo` a second of each coordinator to each replica, and each coordinator reads the registry as often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.replicas.pool import QUIET_POLL_INTERVAL_S
from k8s.simulation.redis_costs import RedisCosts

#: Processor time of a check, at either end (`coordinator.replicas.pool`).
CHECK_S = 0.001
#: Share of a coordinator's core that a plan leaves free of rounds, and the free share of a replica's event loop.
SPARE_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class Pods:
    """Numbers of pods at a load, not rounded, so that they are proportional to it."""

    replicas: float
    coordinators: float
    commits_per_s: float


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource of which one part does not grow with the system."""

    name: str
    share: Callable[[Pods], float]
    """Used share at a load."""
    limit: float = 1.0


def resources(costs: RedisCosts) -> list[Resource]:
    """Return what can break."""
    polls_per_s = 1.0 / QUIET_POLL_INTERVAL_S
    return [
        Resource("coordinator: checks of replicas", lambda pods: pods.replicas * CHECK_S * polls_per_s, SPARE_SHARE),
        Resource(
            "replica: checks by coordinators", lambda pods: pods.coordinators * CHECK_S * polls_per_s, SPARE_SHARE
        ),
        Resource("one Redis: commits", lambda pods: pods.commits_per_s * costs.commit_s),
        Resource(
            "one Redis: reads of the registry",
            lambda pods: pods.coordinators * pods.replicas * costs.read_s_per_replica * polls_per_s,
        ),
    ]


def breaks_at(resource: Resource, pods_at: Callable[[float], Pods]) -> float:
    """Return the sessions per second at which a resource is used up."""
    low, high = 0.0, 1e7
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if resource.share(pods_at(middle)) < resource.limit else (low, middle)
    return high
