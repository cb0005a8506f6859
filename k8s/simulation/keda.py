"""KEDA's part of an autoscaler: the first replica of a pool that has none, and the end of the last one.

Between them the HorizontalPodAutoscaler that KEDA makes decides (`scaling_rule`).
"""

from __future__ import annotations

from collections.abc import Sequence

from k8s.simulation.manifests import Autoscaler
from k8s.simulation.scaling_rule import ScalingRule

#: KEDA's default.
POLLING_S = 30.0


class KedaRule:
    """Decisions of one ScaledObject."""

    def __init__(self, autoscaler: Autoscaler) -> None:
        self._autoscaler = autoscaler
        self._rule = ScalingRule(autoscaler)
        self._active_at_s = 0.0
        self._polled_at_s = -POLLING_S

    def decide(self, now_s: float, current: int, totals: Sequence[float | None]) -> int:
        """Return the number of replicas from now on; arguments as of `ScalingRule.decide`, with 0 replicas allowed."""
        if now_s - self._polled_at_s >= POLLING_S:
            self._polled_at_s = now_s
            current = self._activated(now_s, current, totals)
        return self._rule.decide(now_s, current, totals) if current else 0

    def _activated(self, now_s: float, current: int, totals: Sequence[float | None]) -> int:
        signals = self._autoscaler.signals
        values = zip(signals, totals, strict=True)
        if any(total is not None and total > signal.activation for signal, total in values):
            self._active_at_s = now_s
            return max(current, 1, self._autoscaler.least)
        idle_s = now_s - self._active_at_s
        return 0 if not self._autoscaler.least and idle_s >= (self._autoscaler.cooldown_s or 0.0) else current
