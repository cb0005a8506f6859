"""Series of the losslessness audit: live rounds that were verified again in the background.

`coordinator.audit` observes. The sums of acceptance are counters, so that they can be added over coordinators and over
any time; z is their difference in standard deviations since the process began.
"""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge

#: Labels whose series exist from the start, so that an alert sees the first increase.
MODES = ("greedy", "coupled", "rejection", "block")
RESULTS = ("equal", "tie", "mismatch")
DROP_REASONS = ("queue_full", "busy", "failed")


class AuditMetrics:
    """The series of one coordinator. Used from one thread."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model_name = model_name
        self._rounds = self._counter("audit_rounds", "Rounds that were verified again.", "mode", "result")
        self._dropped = self._counter("audit_rounds_dropped", "Rounds chosen for an audit that had none.", "reason")
        self._accepted = self._counter("audit_accepted_tokens", "Accepted draft tokens of audited rounds.", "mode")
        self._expected = self._counter(
            "audit_expected_accepted_tokens", "Draft tokens of audited rounds that p and q let expect.", "mode"
        )
        self._variance = self._counter("audit_acceptance_variance", "Variance of the accepted draft tokens.", "mode")
        self._z = Gauge(
            "specdec:audit_acceptance_z",
            "Accepted minus expected draft tokens of all audited rounds, in standard deviations.",
            ("model_name", "mode"),
            registry=registry,
        )
        self._sums = dict.fromkeys(MODES, (0.0, 0.0))
        """Accepted minus expected tokens, and their variance, by mode."""
        self._begin_at_zero()

    def observe_checked(self, mode: str, result: str) -> None:
        """Count an audited round; `result` is equal, tie or mismatch."""
        self._rounds.labels(self._model_name, mode, result).inc()

    def observe_dropped(self, reason: str) -> None:
        """Count a round that was chosen and not audited; `reason` is queue_full, busy or failed."""
        self._dropped.labels(self._model_name, reason).inc()

    def observe_acceptance(self, mode: str, num_accepted: int, expected: float, variance: float) -> None:
        """Add the draft tokens accepted in a round, and the mean and variance that p and q let expect."""
        self._accepted.labels(self._model_name, mode).inc(num_accepted)
        self._expected.labels(self._model_name, mode).inc(expected)
        self._variance.labels(self._model_name, mode).inc(variance)
        difference, sum_of_variances = self._sums[mode]
        difference, sum_of_variances = difference + num_accepted - expected, sum_of_variances + variance
        self._sums[mode] = difference, sum_of_variances
        self._z.labels(self._model_name, mode).set(difference / math.sqrt(sum_of_variances) if sum_of_variances else 0)

    def _begin_at_zero(self) -> None:
        for mode in MODES:
            for result in RESULTS:
                self._rounds.labels(self._model_name, mode, result)
        for mode in ("rejection", "block"):
            for metric in (self._accepted, self._expected, self._variance, self._z):
                metric.labels(self._model_name, mode)
        for reason in DROP_REASONS:
            self._dropped.labels(self._model_name, reason)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"specdec:{name}", text, ("model_name", *labels), registry=self._registry)
