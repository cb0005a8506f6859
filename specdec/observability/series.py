"""Makes the series of one service: their prefix, the labels that all have, and gauges that are read at a scrape.

`coordinator_metrics` and `engine_metrics` declare series through `ServiceSeries`. A registry belongs to one service, so
that two services of one process do not share series; importing this module registers nothing.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.contract.version import __version__

PREFIX = "specdec:"

LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
MASK_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, *LATENCY_S[:9])
REQUEST_LATENCY_S = (*LATENCY_S[4:], 60.0, 120.0, 300.0, 600.0)
BATCH_SIZE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
NUM_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
GAMMA = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


def served_name(model: str) -> str:
    """Return the name under which a model is served: the last part of its path or hub id."""
    return model.rstrip("/").rpartition("/")[2] or model


class ServiceSeries:
    """The series of one service, each with the service's own labels."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        """`labels`: constant labels by name. `build_info` and the `process_*` series are made here."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._labels = dict(labels)
        ProcessCollector(registry=self.registry)
        build = {"version": __version__, "python_version": platform.python_version()}
        self.read(lambda: [self.gauge_family("build_info", "Version of this service; always 1.", [(build, 1)])])

    def counter(self, name: str, text: str) -> Counter:
        """Return a counter without further labels."""
        return self.counters(name, text)()

    def gauge(self, name: str, text: str) -> Gauge:
        """Return a gauge without further labels."""
        return Gauge(PREFIX + name, text, tuple(self._labels), registry=self.registry).labels(*self._labels.values())

    def counters(self, name: str, text: str, *label_names: str, start: Iterable[str] = ()) -> Callable[..., Counter]:
        """Return a function from the values of further labels to the counter of these values.

        `start`: values of the only further label whose series exist at 0 from the start.
        """
        counter = Counter(PREFIX + name, text, (*self._labels, *label_names), registry=self.registry)
        series_of = cache(lambda *values: counter.labels(*self._labels.values(), *values))
        for value in start:
            series_of(value)
        return series_of

    def histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        """Return a histogram without further labels."""
        return self.histograms(name, text, bounds)()

    def histograms(self, name: str, text: str, bounds: Sequence[float], *label_names: str) -> Callable[..., Histogram]:
        """Return a function from the values of further labels to the histogram of these values."""
        histogram = Histogram(
            PREFIX + name, text, (*self._labels, *label_names), registry=self.registry, buckets=bounds
        )
        return cache(lambda *values: histogram.labels(*self._labels.values(), *values))

    def read(self, families: Callable[[], Iterable[Metric]]) -> None:
        """Call `families` at every scrape, in the thread of the scrape."""
        self.registry.register(_ScrapedCollector(families))

    def gauge_family(
        self, name: str, text: str, values: Iterable[tuple[Mapping[str, str], float]], label_names: Sequence[str] = ()
    ) -> Metric:
        """Return a gauge as scraped, with a value for each set of further labels.

        `label_names`: names of the further labels; needed if `values` may be empty.
        """
        series = list(values)
        names = tuple(label_names) or tuple(series[0][0] if series else ())
        family = GaugeMetricFamily(PREFIX + name, text, labels=(*self._labels, *names))
        for labels, value in series:
            family.add_metric((*self._labels.values(), *(labels[label] for label in names)), value)
        return family

    def counter_family(self, name: str, text: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> Metric:
        """Return a counter as scraped; every sample has the same further labels."""
        family = CounterMetricFamily(PREFIX + name, text, labels=(*self._labels, *samples[0][0]))
        for labels, value in samples:
            family.add_metric((*self._labels.values(), *labels.values()), value)
        return family


class _ScrapedCollector(Collector):
    """Calls a function at every scrape."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return list(self._families())

    def describe(self) -> list[Metric]:
        return []
