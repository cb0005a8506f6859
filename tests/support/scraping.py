"""Reads metrics endpoints as Prometheus does, with Prometheus' own parser."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.request import urlopen

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from specdec.observability.metrics_server import start_metrics_server
from specdec.settings.addresses import guarded_address
from tests.support.stack import free_port


class Page:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the series of a name (without `specdec:`) with these labels, of which there must be one."""
        return sum(self.series(name, **labels).values())

    def series(self, name: str, **labels: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Return the series of a name with these labels, by all their labels; LookupError where there is none."""
        found = {
            tuple(sorted(sample.labels.items())): sample.value
            for sample in self.samples
            if sample.name == f"specdec:{name}" and labels.items() <= sample.labels.items()
        }
        if not found:
            raise LookupError(f"no series {name} with {labels}")
        return found


class Endpoint:
    """A metrics endpoint at an address."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def scrape(self) -> Page:
        return await asyncio.to_thread(self.scrape_now)

    def scrape_now(self) -> Page:
        """Scrape in this thread."""
        with urlopen(f"http://{self.address}/metrics", timeout=60) as response:
            return Page(response.read().decode())

    async def until(self, is_so: Callable[[Page], bool]) -> Page:
        """Scrape until `is_so` is true of a page; return that page."""
        while True:
            page = await self.scrape()
            if is_so(page):
                return page


@contextmanager
def served(registry: CollectorRegistry) -> Iterator[Endpoint]:
    """Serve a registry as a service does."""
    port = free_port()
    stop = start_metrics_server(registry, *guarded_address(f"127.0.0.1:{port}"))
    try:
        yield Endpoint(f"127.0.0.1:{port}")
    finally:
        stop()
