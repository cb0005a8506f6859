"""Operational signals as a dashboard reads them, and whether they move the right way under a step of load and back.

A step is observed by three groups of scrapes at a fixed interval: before it, from when it has taken hold, and from when
it has ended. Each group begins with a scrape at once, and two more follow: a signal must have moved by the second one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise

from tests.support.scraping import Endpoint, Page

#: Interval of the scrapes. Blocks of KV count as active for a second after the last call, hence for less than two.
INTERVAL_S = 0.5
#: Scrapes in an interval, of which gauges are read: a target has requests in its queue for parts of a step only.
NUM_LOOKS = 5
#: Least factor between a signal before and during a step that counts as a move.
LEAST_FACTOR = 1.5


class Reading(Enum):
    """How a signal is read from two scrapes."""

    GAUGE = "the values after the first one"
    RATE = "the increase per second between the two"
    MEAN = "the mean of what a histogram observed between the two"
    EVENTS = "the increase since the last scrape before the step, or since its end"


class Move(Enum):
    """What a signal does under a step."""

    RISES = "rises"
    FALLS = "falls"
    STAYS = "stays"


@dataclass(frozen=True)
class Signal:
    """A series of a service, and its move under a step."""

    move: Move
    service: str
    name: str
    reading: Reading
    labels: Mapping[str, str] = field(default_factory=dict)
    is_back_after: bool = True
    """True if the signal returns when the step ends."""

    def __str__(self) -> str:
        labels = ",".join(f"{key}={value}" for key, value in self.labels.items())
        return f"{self.service} {self.name}{{{labels}}} {self.move.value}"


def rises(service: str, name: str, reading: Reading = Reading.GAUGE, **labels: str) -> Signal:
    return Signal(Move.RISES, service, name, reading, labels)


def falls(service: str, name: str, reading: Reading = Reading.GAUGE, **labels: str) -> Signal:
    return Signal(Move.FALLS, service, name, reading, labels)


def stays(service: str, name: str, reading: Reading = Reading.EVENTS, **labels: str) -> Signal:
    return Signal(Move.STAYS, service, name, reading, labels)


def for_good(signal: Signal) -> Signal:
    """Return a signal that the end of its step does not bring back."""
    return replace(signal, is_back_after=False)


@dataclass(frozen=True)
class Scrape:
    """The pages of all services at one time."""

    time_s: float
    pages: Mapping[str, Page | None]
    """Page of each service; None for a service that does not answer."""

    def value(self, signal: Signal, suffix: str = "") -> float:
        page = self.pages.get(signal.service)
        if signal.name == "up":
            return float(page is not None)
        if page is None:
            raise LookupError(f"{signal.service} does not answer")
        return page.value(signal.name + suffix, **signal.labels)


async def scrape(endpoints: Mapping[str, Endpoint]) -> Scrape:
    """Scrape all services at once."""

    async def page_of(endpoint: Endpoint) -> Page | None:
        try:
            return await endpoint.scrape()
        except OSError:
            return None

    time_s = time.monotonic()
    pages = await asyncio.gather(*map(page_of, endpoints.values()))
    return Scrape(time_s, dict(zip(endpoints, pages, strict=True)))


async def scrape_twice(endpoints: Mapping[str, Endpoint]) -> list[Scrape]:
    """Scrape at once and during two intervals."""
    scrapes = [await scrape(endpoints)]
    for _ in range(2 * NUM_LOOKS):
        await asyncio.sleep(INTERVAL_S / NUM_LOOKS)
        scrapes.append(await scrape(endpoints))
    return scrapes


@dataclass(frozen=True)
class Observed:
    """The scrapes around one step."""

    before: Sequence[Scrape]
    during: Sequence[Scrape]
    after: Sequence[Scrape]

    def moves_right(self, signal: Signal) -> bool:
        """Return whether a signal has moved the right way by the second scrape of the step."""
        before = self.value_before(signal)
        values = self.values_during(signal)
        if signal.move is Move.RISES:
            return any(value > LEAST_FACTOR * before for value in values)
        if signal.move is Move.FALLS:
            return any(value < before / LEAST_FACTOR for value in values)
        return all(value == before for value in values)

    def returns(self, signal: Signal) -> bool:
        """Return whether a signal that is to return is nearer to where it came from by the second scrape afterwards."""
        if not signal.is_back_after:
            return True
        before, during = self.value_before(signal), self.values_during(signal)
        furthest = min(during) if signal.move is Move.FALLS else max(during)
        return any(abs(value - before) <= abs(value - furthest) for value in self.values_after(signal))

    def value_before(self, signal: Signal) -> float:
        scrapes = self.before[-1 - NUM_LOOKS :]
        values = list(_values(signal, scrapes, since=scrapes[0]))
        return values[-1] if values else 0.0

    def values_during(self, signal: Signal) -> list[float]:
        return list(_values(signal, self.during, since=self.before[-1]))

    def values_after(self, signal: Signal) -> list[float]:
        return list(_values(signal, self.after, since=self.after[0]))


def _values(signal: Signal, scrapes: Sequence[Scrape], since: Scrape) -> Iterator[float]:
    """Yield a gauge at each scrape but the first, another signal for each interval; a mean of nothing is left out."""
    if signal.reading is Reading.GAUGE:
        yield from (scrape.value(signal) for scrape in scrapes[1:])
        return
    for earlier, later in pairwise(scrapes[::NUM_LOOKS]):
        if signal.reading is Reading.EVENTS:
            yield later.value(signal) - since.value(signal)
        elif signal.reading is Reading.RATE:
            yield (later.value(signal) - earlier.value(signal)) / (later.time_s - earlier.time_s)
        else:
            yield from _means(signal, earlier, later)
    if signal.reading is Reading.MEAN:  # a scrape that falls between two events on a busy machine sees none
        yield from _means(signal, since, scrapes[-1])


def _means(signal: Signal, earlier: Scrape, later: Scrape) -> Iterator[float]:
    """Yield the mean of what a histogram observed between two scrapes, if there was anything."""
    if count := later.value(signal, "_count") - earlier.value(signal, "_count"):
        yield (later.value(signal, "_sum") - earlier.value(signal, "_sum")) / count
