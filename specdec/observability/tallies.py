"""Counters, gauges and histograms of frequent events, updated in one thread without a lock and read when scraped.

The series equal those of `prometheus_client`'s own classes, which several threads may update. `series` makes them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count:
    """One series of a counter or of a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class CounterTally(Collector):
    """A counter with labels."""

    _family_type: ClassVar[type[CounterMetricFamily] | type[GaugeMetricFamily]] = CounterMetricFamily

    def __init__(self, registry: CollectorRegistry, name: str, text: str, label_names: Sequence[str]) -> None:
        self._name, self._text, self._label_names = name, text, tuple(label_names)
        self._series: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """Return the series of these label values, which starts at 0; callers keep it."""
        return self._series.setdefault(values, Count())

    def collect(self) -> list[Metric]:
        family = self._family_type(self._name, self._text, labels=self._label_names)
        for values, count in list(self._series.items()):
            family.add_metric(values, count.value)
        return [family]

    def describe(self) -> list[Metric]:
        return [self._family_type(self._name, self._text, labels=self._label_names)]


class GaugeTally(CounterTally):
    """A gauge with labels; its series may also fall."""

    _family_type = GaugeMetricFamily


class Buckets:
    """One series of a histogram."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: ascending upper bounds; infinity is added."""
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class HistogramTally(Collector):
    """A histogram with labels."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        text: str,
        label_names: Sequence[str],
        bounds: Sequence[float],
    ) -> None:
        """`bounds`: ascending upper bounds of the buckets; infinity is added."""
        self._name, self._text, self._label_names = name, text, tuple(label_names)
        self._bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], Buckets] = {}
        registry.register(self)

    def labels(self, *values: str) -> Buckets:
        """Return the series of these label values, which starts empty; callers keep it."""
        return self._series.setdefault(values, Buckets(self._bounds))

    def collect(self) -> list[Metric]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family = self._family()
        for values, series in list(self._series.items()):
            buckets = list(zip(bounds, accumulate(list(series.counts)), strict=True))
            family.add_metric(values, buckets, series.total)
        return [family]

    def describe(self) -> list[Metric]:
        return [self._family()]

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._text, labels=self._label_names)
