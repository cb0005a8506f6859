"""The series that services export, read from the generated page docs/reference/metrics.md.

`make reference` writes the page from the registries that running services serve, and a test holds it current.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path("docs") / "reference" / "metrics.md"
#: Labels that Prometheus and its operator give to each series of a pod. `cluster` is that of a fleet of Prometheuses.
SCRAPE_LABELS = frozenset({"job", "instance", "namespace", "pod", "container", "endpoint", "cluster"})
#: Series that Prometheus itself makes for each scrape.
_SCRAPE_SERIES = ("up", "scrape_duration_seconds", "scrape_samples_scraped")
#: Labels of the series that Prometheus makes of the alerts.
_ALERTS = SCRAPE_LABELS | {"alertname", "alertstate", "severity"}
_ITEM = re.compile(r"^- `([^`]+)` \((gauge|counter|histogram)(?:; ([^)]*))?\)", re.MULTILINE)

Series = dict[str, frozenset[str]]
"""Names of labels by the name of a series."""


def exported_series(root: Path) -> Series:
    """Return every series of every service with its labels; a histogram has three."""
    text = re.sub(r"\n  +", " ", (root / PAGE).read_text())
    found: Series = dict.fromkeys(_SCRAPE_SERIES, SCRAPE_LABELS) | {"ALERTS": _ALERTS}
    for name, kind, listed in _ITEM.findall(text):
        labels = SCRAPE_LABELS | frozenset(re.findall(r"`(\w+)`", listed))
        for series, more in _series_of(name, kind):
            found[series] = found.get(series, frozenset()) | labels | more
    return found


def _series_of(name: str, kind: str) -> list[tuple[str, frozenset[str]]]:
    if kind != "histogram":
        return [(name, frozenset())]
    return [(f"{name}_bucket", frozenset({"le"})), (f"{name}_sum", frozenset()), (f"{name}_count", frozenset())]
