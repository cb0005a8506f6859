"""Request traces: rates over time, and arrivals drawn from them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Trace:
    """A rate of requests over time, linear between its points."""

    name: str
    points: tuple[tuple[float, float], ...]
    """Times in seconds from 0 on, and requests per second."""

    @property
    def end_s(self) -> float:
        return self.points[-1][0]

    def rate_per_s(self, at_s: float) -> float:
        """Return the rate at a time."""
        for (begin_s, before), (end_s, after) in pairwise(self.points):
            if begin_s <= at_s < end_s:
                return before + (after - before) * (at_s - begin_s) / (end_s - begin_s)
        return self.points[-1][1]

    def arrivals(self, source: random.Random) -> Iterator[float]:
        """Yield the times of requests: a Poisson process, thinned from the largest rate."""
        most = max(rate for _, rate in self.points)
        now_s = source.expovariate(most)
        while now_s < self.end_s:
            if source.random() * most < self.rate_per_s(now_s):
                yield now_s
            now_s += source.expovariate(most)


def steady(rate_per_s: float, seconds: float) -> Trace:
    return Trace(f"{rate_per_s:g}/s", ((0.0, rate_per_s), (seconds, rate_per_s)))


def step(low: float, high: float, minutes: tuple[float, float, float]) -> Trace:
    """Return a step up and down again; `minutes` are the lengths of its three parts."""
    up_s = minutes[0] * 60
    down_s = up_s + minutes[1] * 60
    end_s = down_s + minutes[2] * 60
    points = ((0.0, low), (up_s, low), (up_s + 1, high), (down_s, high), (down_s + 1, low), (end_s, low))
    return Trace(f"step {low:g} to {high:g}/s and back", points)


def ramp(low: float, high: float, minutes: tuple[float, float, float, float, float]) -> Trace:
    """Return a slow rise and fall; `minutes` are the lengths of its five parts: low, rise, high, fall, low."""
    times = [0.0]
    for part in minutes:
        times.append(times[-1] + part * 60)
    rates = (low, low, high, high, low, low)
    return Trace(f"ramp {low:g} to {high:g}/s and back", tuple(zip(times, rates, strict=True)))
