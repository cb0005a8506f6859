"""The metrics page: every series of a coordinator, a replica and a gateway, from the registries that they serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.metrics import GatewayMetrics
from specdec.core.restore_rule import RestoreRule
from specdec.observability.metrics import CoordinatorMetrics, EngineMetrics
from specdec.state.kv_tally import KvTally
from tests.support.reference.markdown import code, document, item, items, paragraph

_INTRODUCTION = """`--metrics HOST:PORT` serves Prometheus text at `/metrics`. A series has the name that vLLM gives to
the same measurement where there is one, with the prefix `specdec:`. Counters end in `_total`; a histogram has
`_bucket`, `_sum` and `_count`. The [monitoring guide](../how-to/monitor.md) says which series are worth a graph."""
_GATEWAY_TEXT = """The gateway serves its series at `/metrics` of its own address, too. The counters of speculation have
vLLM's own names, so that tools made for vLLM read them."""
_TIER_TEXT = "A replica with `--kv-tier-url` has these series, too."


@dataclass(frozen=True)
class _Load:
    kv_usage: float = 0.0
    num_sessions: int = 0


@dataclass(frozen=True)
class _Tier:
    """A tier whose series are read and never moved."""

    tally: KvTally
    rule: RestoreRule


def page() -> str:
    """Return the page as it should be."""
    replica = EngineMetrics("model", role="target")
    replica.watch_load(_Load)
    tier = EngineMetrics("model", role="target")
    tier.watch_kv_tier(_Tier(KvTally(), _rule()))
    return document(
        "Metrics",
        paragraph(_INTRODUCTION),
        "## Coordinator", items(series(CoordinatorMetrics("model").registry)),
        "## Gateway", paragraph(_GATEWAY_TEXT), items(series(GatewayMetrics().registry)),
        "## Draft and target replicas", items(series(replica.registry)),
        "## Cold tier of KV", paragraph(_TIER_TEXT),
        items([line for line in series(tier.registry) if "kv_tier" in line]),
    )  # fmt: skip


def series(registry: CollectorRegistry) -> list[str]:
    """Return one list item for each series of a registry, in the order of registration."""
    return [_series(collector, family) for collector in registry._collector_to_names for family in collector.collect()]


def _series(collector: Any, family: Any) -> str:
    labels = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ())
    name = f"{family.name}_total" if family.type == "counter" else family.name
    notes = "; ".join(filter(None, (family.type, ", ".join(map(code, labels)))))
    return item(f"{code(name)} ({notes})", family.documentation)


def _rule() -> RestoreRule:
    return RestoreRule()
