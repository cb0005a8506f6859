"""The rule of the HorizontalPodAutoscaler, as Kubernetes documents it.

For each metric the desired number is `ceil(current * value / target)`, and the largest one counts. A ratio within 0.1
of 1 changes nothing. A lower number has to hold for the whole stabilisation window, and policies limit the change
within a period.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from k8s.simulation.manifests import Autoscaler, Policy

SYNC_S = 15.0
TOLERANCE = 0.1


def desired_replicas(current: int, total: float, target: float) -> int:
    """Return the number of replicas that a metric asks for.

    Args:
        current: replicas now, at least 1.
        total: sum of the metric over the replicas.
        target: value that each is to have on average.
    """
    wanted = round(total * 1e3) / round(target * 1e3)  # Kubernetes counts in thousandths
    return current if abs(wanted / current - 1.0) <= TOLERANCE else math.ceil(wanted)


class ScalingRule:
    """Decisions of one autoscaler, one every `SYNC_S`."""

    def __init__(self, autoscaler: Autoscaler) -> None:
        self._autoscaler = autoscaler
        self._recommended: list[tuple[float, int]] = []
        """Recommendations within the longer window, with their times."""
        self._changes: list[tuple[float, int]] = []
        """Changes of the number, with their times."""

    def decide(self, now_s: float, current: int, totals: Sequence[float | None]) -> int:
        """Return the number of replicas from now on.

        Args:
            now_s: time of the decision.
            current: replicas now, at least 1.
            totals: value of each signal summed over the replicas; None: it has no value. A missing value keeps the
                number from falling.
        """
        scaler = self._autoscaler
        asked = [
            desired_replicas(current, total, signal.target)
            for signal, total in zip(scaler.signals, totals, strict=True)
            if total is not None
        ]
        wanted = max(asked, default=current)
        if None in totals:
            wanted = max(wanted, current)
        wanted = self._limited(now_s, current, self._stabilised(now_s, current, wanted))
        wanted = min(max(wanted, scaler.least, 1), scaler.most)
        if wanted != current:
            self._changes.append((now_s, wanted - current))
        return wanted

    def _stabilised(self, now_s: float, current: int, wanted: int) -> int:
        """Return the current number, moved into the range of what was recommended within the windows."""
        up, down = self._autoscaler.up, self._autoscaler.down
        self._recommended.append((now_s, wanted))
        least = min(number for at_s, number in self._recommended if at_s >= now_s - up.window_s)
        most = max(number for at_s, number in self._recommended if at_s >= now_s - down.window_s)
        longest_s = max(up.window_s, down.window_s)
        self._recommended = [each for each in self._recommended if each[0] >= now_s - longest_s]
        return min(max(current, least), most)

    def _limited(self, now_s: float, current: int, wanted: int) -> int:
        scaler = self._autoscaler
        if wanted > current:
            return min(wanted, max(self._limit(now_s, current, policy, 1) for policy in scaler.up.policies))
        if wanted < current:
            return max(wanted, min(self._limit(now_s, current, policy, -1) for policy in scaler.down.policies))
        return wanted

    def _limit(self, now_s: float, current: int, policy: Policy, sign: int) -> int:
        """Return the furthest number that a policy allows: a change from the number at the begin of its period."""
        begin = current - sum(change for at_s, change in self._changes if at_s > now_s - policy.period_s)
        if not policy.is_percent:
            return begin + sign * int(policy.value)
        share = begin * (1.0 + sign * policy.value / 100.0)
        return math.ceil(share) if sign > 0 else math.floor(share)
