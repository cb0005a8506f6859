"""Weights over the draft pools of one class of requests, by the Hedge rule on the goodput of each pool.

A pool's weight falls with the distance between its predicted goodput and the best pool's on the same tokens. Every pool
is scored on every span, so no request is spent on a trial. A pool that was not scored keeps its weight (sleeping
experts). A small part of the total weight is shared evenly, so that the weights follow a class that changes.
`coordinator.round.routing_table` computes the goodput.

Source: Freund and Schapire 1997; Freund, Schapire, Singer, Warmuth 1997 (sleeping); Herbster and Warmuth 1998 (share).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp

#: Learning rate: a goodput of 0 multiplies a weight by exp(-RATE). About ten spans separate pools that differ by 20 %.
RATE = 2.0

#: Part of the total weight that is shared evenly at every span.
SHARED = 0.01

#: Factor by which another pool's weight must exceed that of the chosen one, so that equal pools do not alternate.
MARGIN = 1.25


class Hedge:
    """The weights of one class."""

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._chosen = ""

    def weight(self, pool: str) -> float:
        """Return the weight of a pool, 0..1; the weights of all pools sum to 1."""
        return self._weights.get(pool, 0.0)

    def choose(self, pools: Sequence[str]) -> str:
        """Return the pool with the largest weight among `pools`; the first one while their weights are equal."""
        for pool in pools:
            self._add(pool)
        if self._chosen not in pools:
            self._chosen = pools[0]
        best = max(pools, key=lambda pool: self._weights[pool])
        if self._weights[best] > MARGIN * self._weights[self._chosen]:
            self._chosen = best
        return self._chosen

    def observe(self, goodputs: Mapping[str, float]) -> None:
        """Update the weights after a span.

        Args:
            goodputs: tokens per second by pool; pools that were not scored are left out.
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
        """Give a new pool an equal share of the weight."""
        if pool not in self._weights:
            share = 1.0 / (len(self._weights) + 1)
            self._weights = {other: weight * (1.0 - share) for other, weight in self._weights.items()}
            self._weights[pool] = share
