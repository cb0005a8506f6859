"""The cold tier's counts and estimates as Prometheus series, read from `specdec.state.kv_tier` when scraped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.core.restore_rule import RestoreRule


class _Tally(Protocol):
    """The part of `specdec.state.kv_tally.KvTally` that is read here."""

    @property
    def choices(self) -> Mapping[str, int]: ...
    @property
    def num_restored(self) -> int: ...
    @property
    def num_damaged(self) -> int: ...
    @property
    def num_bytes(self) -> Mapping[str, int]: ...
    @property
    def dropped(self) -> Mapping[str, int]: ...
    @property
    def replay_s_per_run(self) -> float: ...


class KvTier(Protocol):
    """The part of `specdec.state.kv_tier.KvTier` that is measured."""

    @property
    def tally(self) -> _Tally: ...
    @property
    def rule(self) -> RestoreRule: ...


class KvTierCollector(Collector):
    """Collects the series of one replica's tier."""

    def __init__(self, tier: KvTier, labels: Mapping[str, str]) -> None:
        self._tier = tier
        self._labels = labels

    def collect(self) -> list[Metric]:
        return [*self._counters(), *self._gauges()]

    def describe(self) -> list[Metric]:
        return []

    def _counters(self) -> Iterator[Metric]:
        tally = self._tier.tally
        yield self._counter("choices", "Calls that lacked a whole run of KV, by choice.", tally.choices, "choice")
        yield self._counter("runs_restored", "Runs of KV fetched and copied in.", {"": tally.num_restored})
        yield self._counter("values_damaged", "Values that were not what their key says.", {"": tally.num_damaged})
        yield self._counter("bytes", "Bytes of KV read and written.", tally.num_bytes, "direction")
        yield self._counter("runs_dropped", "Runs of KV that were not written, by reason.", tally.dropped, "reason")

    def _counter(self, name: str, text: str, values: Mapping[str, int], label: str = "") -> Metric:
        names = [*self._labels, label] if label else list(self._labels)
        family = CounterMetricFamily(f"specdec:kv_tier_{name}", text, labels=names)
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key] if label else list(self._labels.values()), value)
        return family

    def _gauges(self) -> Iterator[Metric]:
        tier = self._tier
        values = {
            "latency_seconds": ("L: an answer of the KV tier, as measured.", tier.rule.latency_s),
            "bytes_per_second": ("W: from the KV tier into KV blocks, as measured.", tier.rule.bytes_per_s),
            "replay_seconds": ("What computing a run of KV takes, as estimated last.", tier.tally.replay_s_per_run),
        }
        for name, (text, value) in values.items():
            gauge = GaugeMetricFamily(f"specdec:kv_tier_{name}", text, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge
