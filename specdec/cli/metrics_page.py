"""Reads the Prometheus pages of services. A client-only install has no library that does."""

from __future__ import annotations

import http.client
import re
from collections.abc import Mapping
from dataclasses import dataclass

from specdec.settings.addresses import split_address

PREFIX = "specdec:"

_TIMEOUT_S = 3.0
_MAX_PAGE_BYTES = 1 << 24
_LINE = re.compile(rf"{PREFIX}(\w+)(?:\{{(.*)\}})? (\S+).*")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    """Name without the prefix."""
    labels: Mapping[str, str]
    value: float


class MetricsPage:
    """The series of one service that have the prefix `specdec:`."""

    def __init__(self, text: str) -> None:
        found = (_LINE.fullmatch(line) for line in text.splitlines())
        self._series = [Series(one[1], dict(_LABEL.findall(one[2] or "")), float(one[3])) for one in found if one]

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the series of a name that have these labels; None without any."""
        values = [one.value for one in self._series if one.name == name and labels.items() <= one.labels.items()]
        return sum(values) if values else None


def read_page(address: str) -> MetricsPage | None:
    """Return the metrics that a service serves at HOST:PORT; None if it cannot be read."""
    connection = http.client.HTTPConnection(*split_address(address), timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read(_MAX_PAGE_BYTES).decode(errors="replace")
        return MetricsPage(text) if response.status == http.client.OK else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
