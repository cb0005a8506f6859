"""Counters and histograms of frequent events, updated in one thread without a lock and read when scraped.

The series equal those of `prometheus_client`'s own classes, which several threads may update. Called by `metrics`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        self.value += amount


class CounterTally(Collector):
    """A counter with labels."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, label_names: Sequence[str]) -> None:
        self._name, self._text, self._label_names = name, text, tuple(label_names)
        self._series: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """Return the series of these label values, which starts at 0; callers keep it."""
        return self._series.setdefault(values, Count())

    def collect(self) -> list[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._label_names)
        for values, count in list(self._series.items()):
            family.add_metric(values, count.value)
        return [family]

    def describe(self) -> list[Metric]:
        return [CounterMetricFamily(self._name, self._text, labels=self._label_names)]


class HistogramTally(Collector):
    """A histogram with one series."""

    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, labels: dict[str, str], buckets: Sequence[float]
    ) -> None:
        """`buckets`: ascending upper bounds; infinity is added."""
        self._name, self._text, self._labels = name, text, labels
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> list[Metric]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family = self._family()
        family.add_metric(tuple(self._labels.values()), buckets, self._sum)
        return [family]

    def describe(self) -> list[Metric]:
        return [self._family()]

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
