"""Compares a run with the latency limits and with the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from k8s.simulation.cluster import History
from k8s.simulation.pools import Workload
from specdec.cli.planning.deployment import Deployment
from specdec.cli.planning.search import best_deployment

#: Time for which a number of replicas may follow an earlier plan: two stabilisation windows, because the second replica
#: leaves when the signals of the smaller pool have held for one, and three minutes for a replica a minute.
FOLLOWING_S = 780.0

#: Plans are made for multiples of this rate, because each takes half a second.
_PLANNED_RATES = 2.5

Replicas = Sequence[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Held:
    """Shares of the requests that held the limits."""

    both: float
    ttft: float
    tpot: float


def held(history: History, workload: Workload) -> Held:
    """Return the shares of all requests that arrived; one that did not end has held nothing."""
    load, served = workload.load, history.served
    in_time = [(each.ttft_s <= load.ttft_s, each.tpot_s <= load.tpot_s) for each in served]
    total = max(1, history.num_arrived)
    return Held(
        sum(ttft and tpot for ttft, tpot in in_time) / total,
        sum(ttft for ttft, _ in in_time) / total,
        sum(tpot for _, tpot in in_time) / total,
    )


def num_reversals(replicas: Replicas) -> int:
    """Return how often the number changed its direction."""
    changes = [after - before for (_, before), (_, after) in pairwise(replicas) if after != before]
    return sum((before > 0) != (after > 0) for before, after in pairwise(changes))


def largest_difference(replicas: Replicas, planned: Callable[[float], int]) -> int:
    """Return the largest distance of the number from what was planned within the `FOLLOWING_S` before.

    Args:
        replicas: number by time.
        planned: the plan by time.
    """
    worst = 0
    for at_s, number in replicas:
        plans = [planned(before_s) for before_s, _ in replicas if at_s - FOLLOWING_S <= before_s <= at_s]
        worst = max(worst, number - max(plans), min(plans) - number)
    return worst


def share_within_one(replicas: Replicas, planned: Callable[[float], int]) -> float:
    """Return the share of the time in which the number differs by at most 1 from the plan of that moment."""
    return sum(abs(number - planned(at_s)) <= 1 for at_s, number in replicas) / len(replicas)


class Planner:
    """Plans of `specdec plan` by rate."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.deployment = cache(self._deployment)

    def replicas(self, rate_per_s: float) -> dict[str, int]:
        """Return the planned number of replicas of each pool."""
        rate_per_s = max(1.0, _PLANNED_RATES * math.ceil(round(rate_per_s / _PLANNED_RATES, 6)))
        deployment = self.deployment(rate_per_s)
        load = replace(self._workload.load, rate_per_s=rate_per_s)
        return {
            "target": deployment.num_targets,
            "draft": deployment.num_drafts,
            "coordinator": deployment.num_coordinators(load),
        }

    def _deployment(self, rate_per_s: float) -> Deployment:
        workload = self._workload
        load = replace(workload.load, rate_per_s=rate_per_s)
        return best_deployment(load, workload.alpha, workload.deployment.target, workload.deployment.draft)
