"""Series as Prometheus has scraped them: samples of each set of labels, for as long as a query looks back."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

SCRAPE_INTERVAL_S = 15.0
#: Time for which an instant query finds the last sample of a series, as Prometheus sets it by default.
LOOKBACK_S = 300.0
_MAX_SAMPLES = 64

Labels = Mapping[str, str]


@dataclass(slots=True)
class OneSeries:
    """Samples of one set of labels, oldest first."""

    labels: Labels
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    """Times and values."""
    is_stale: bool = False
    """Its pod is gone, so that an instant query does not find it."""

    def within(self, begin_s: float, end_s: float) -> list[tuple[float, float]]:
        return [sample for sample in self.samples if begin_s < sample[0] <= end_s]


class Scraped:
    """All series by name."""

    def __init__(self) -> None:
        self._series: dict[str, dict[tuple[tuple[str, str], ...], OneSeries]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._series

    def declare(self, name: str) -> None:
        """Make a series known that may have no sample yet."""
        self._series.setdefault(name, {})

    def add(self, now_s: float, name: str, labels: Labels, value: float) -> None:
        key = tuple(sorted(labels.items()))
        self._series[name].setdefault(key, OneSeries(dict(labels))).samples.append((now_s, value))

    def end(self, pod: str) -> None:
        """Mark the series of a pod that has ended."""
        for named in self._series.values():
            for series in named.values():
                series.is_stale |= series.labels.get("pod") == pod

    def of(self, name: str) -> list[OneSeries]:
        return list(self._series[name].values())
