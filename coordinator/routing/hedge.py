"""Weights over the draft pools of a class of requests: the Hedge rule, fed by what every pool would have made.

A pool's weight falls by how far its predicted goodput stays behind the best one's on the same tokens. Every scored pool
is heard at every span, so trying them costs no request; a pool that was not scored keeps its share (sleeping experts),
and a small part of all weight is dealt out evenly, so that a class that changes is followed.

Source: Freund and Schapire 1997; Freund, Schapire, Singer, Warmuth 1997 (sleeping); Herbster and Warmuth 1998 (share).
Not here: goodput (`coordinator.round.routing_table`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp

#: By how much a loss of all goodput moves a weight: exp(-RATE). Some ten spans tell 20 % apart.
RATE = 2.0

#: Part of all weight that is dealt out evenly at every span.
SHARED = 0.01

#: A pool is left for another one when that has so much more weight: equal pools do not take turns.
MARGIN = 1.25


class Hedge:
    """The weights of one class."""

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._chosen = ""

    def weight(self, pool: str) -> float:
        """0..1; those of all pools seen sum to 1."""
        return self._weights.get(pool, 0.0)

    def choose(self, pools: Sequence[str]) -> str:
        """The pool with the most weight, of those there are; the first one while nothing tells them apart."""
        for pool in pools:
            self._add(pool)
        if self._chosen not in pools:
            self._chosen = pools[0]
        best = max(pools, key=lambda pool: self._weights[pool])
        if self._weights[best] > MARGIN * self._weights[self._chosen]:
            self._chosen = best
        return self._chosen

    def observe(self, goodputs: Mapping[str, float]) -> None:
        """A span was scored.

        Args:
            goodputs: tokens a second, by pool; those left out were not scored.
        """
        for pool in goodputs:
            self._add(pool)
        best = max(goodputs.values(), default=0.0)
        if len(goodputs) < 2 or best <= 0.0:
            return
        awake = sum(self._weights[pool] for pool in goodputs)
        moved = {pool: self._weights[pool] * exp(RATE * (value / best - 1.0)) for pool, value in goodputs.items()}
        scale = awake / sum(moved.values())
        for pool, weight in moved.items():
            self._weights[pool] = (1.0 - SHARED) * scale * weight + SHARED * awake / len(moved)

    def _add(self, pool: str) -> None:
        """A new pool gets an equal share from the others."""
        if pool not in self._weights:
            share = 1.0 / (len(self._weights) + 1)
            self._weights = {other: weight * (1.0 - share) for other, weight in self._weights.items()}
            self._weights[pool] = share
