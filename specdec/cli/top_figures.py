"""The figures of `specdec top`: what a system is doing, from GetInfo and from two readings of its metrics.

Requests and tokens are the coordinators' own. Queues are known by pool only, because a replica's metrics do not have
its id. Figures that no service reports are None.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from specdec.cli.metrics_page import MetricsPage, read_page
from specdec.client import Client, Pool, ServerInfo

_MAX_READERS = 16


@dataclass(frozen=True, slots=True)
class Reading:
    """What a system reported at one time."""

    at_s: float
    info: ServerInfo
    pages: Mapping[str, MetricsPage]
    """Metrics by address."""
    unreachable: tuple[str, ...]
    """Metrics addresses that could not be read."""


@dataclass(frozen=True, slots=True)
class PoolFigures:
    pool: Pool
    num_waiting: int | None
    """Number of calls that no step has taken yet."""
    num_running: int | None
    """Number of calls that are in the steps of the devices."""
    draft_tokens_per_s: float | None
    """Draft tokens made (draft) or verified (target) per second."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The state of a system, and its rates between two readings."""

    info: ServerInfo
    pools: tuple[PoolFigures, ...]
    num_running: int | None
    """Number of requests that are generating."""
    num_admitting: int | None
    """Number of requests that are taking their session and their prompt."""
    capacity: int | None
    """Largest number of requests at once."""
    tokens_per_s: float | None
    acceptance: float | None
    """Accepted share of the draft tokens between the readings; None without any."""
    num_pages: int
    """Number of services whose metrics were read."""
    unreachable: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {
            "version": self.info.version,
            "target_model": self.info.target_model,
            "requests": {"running": self.num_running, "admitting": self.num_admitting, "capacity": self.capacity},
            "tokens_per_s": self.tokens_per_s,
            "acceptance": self.acceptance,
            "pools": [_pool_fields(each) for each in self.pools],
            "metrics": {"num_services": self.num_pages, "unreachable": list(self.unreachable)},
        }


class Reader:
    """Reads a system through a client and the metrics addresses that `addresses` returns."""

    def __init__(
        self, client: Client, addresses: Callable[[], Iterable[str]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client, self._addresses, self._clock = client, addresses, clock

    def read(self) -> Reading:
        """Read the system once. Raises SpecdecError if the coordinator cannot be reached."""
        info = self._client.info()
        addresses = list(dict.fromkeys(self._addresses()))
        with ThreadPoolExecutor(_MAX_READERS) as threads:
            pages = dict(zip(addresses, threads.map(read_page, addresses), strict=True))
        found = {address: page for address, page in pages.items() if page is not None}
        return Reading(self._clock(), info, found, tuple(address for address in addresses if address not in found))


def figures_of(before: Reading, now: Reading) -> Figures:
    """Return the figures of `now`, with rates since `before`; the rates are None if both are the same reading."""
    drafted = _increase(before, now, "spec_decode_num_draft_tokens_total")
    accepted = _increase(before, now, "spec_decode_num_accepted_tokens_total")
    coordinators = [page for page in now.pages.values() if page.total("request_capacity") is not None]
    return Figures(
        info=now.info,
        pools=tuple(_figures_of_pool(pool, before, now) for pool in now.info.pools),
        num_running=_count(coordinators, "num_requests_running"),
        num_admitting=_count(coordinators, "num_requests_admitting"),
        capacity=_count(coordinators, "request_capacity"),
        tokens_per_s=_rate(before, now, "generation_tokens_total"),
        acceptance=accepted / drafted if drafted and accepted is not None else None,
        num_pages=len(now.pages),
        unreachable=now.unreachable,
    )


def _figures_of_pool(pool: Pool, before: Reading, now: Reading) -> PoolFigures:
    labels = {"role": pool.role, "pool": pool.name}
    return PoolFigures(
        pool=pool,
        num_waiting=_count(now.pages.values(), "num_requests_waiting", **labels),
        num_running=_count(now.pages.values(), "num_requests_running", **labels),
        draft_tokens_per_s=_rate(before, now, "draft_tokens_total", **labels),
    )


def _count(pages: Iterable[MetricsPage], name: str, **labels: str) -> int | None:
    totals = [total for page in pages if (total := page.total(name, **labels)) is not None]
    return int(sum(totals)) if totals else None


def _rate(before: Reading, now: Reading, name: str, **labels: str) -> float | None:
    increase = _increase(before, now, name, **labels)
    return None if increase is None else increase / (now.at_s - before.at_s)


def _increase(before: Reading, now: Reading, name: str, **labels: str) -> float | None:
    """Return by how much a counter has risen in all services that were read twice; None without any.

    The counter of a service that was restarted in between begins at 0 again.
    """
    if now.at_s <= before.at_s:
        return None
    increases = []
    for address, page in now.pages.items():
        total = page.total(name, **labels)
        if total is not None and address in before.pages:
            earlier = before.pages[address].total(name, **labels) or 0.0
            increases.append(total - earlier if total >= earlier else total)
    return sum(increases) if increases else None


def _pool_fields(figures: PoolFigures) -> dict[str, Any]:
    pool = figures.pool
    return {
        "role": pool.role,
        "name": pool.name,
        "model": pool.model,
        "shadow": pool.shadow,
        "acceptance": pool.alpha,
        "gamma": pool.gamma,
        "num_waiting": figures.num_waiting,
        "num_running": figures.num_running,
        "draft_tokens_per_s": figures.draft_tokens_per_s,
        "replicas": [asdict(replica) for replica in pool.replicas],
    }
