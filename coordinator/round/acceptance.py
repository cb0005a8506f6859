"""Acceptance of draft tokens by their position in the round, as exponentially weighted counts.

`gamma` and `routing_table` choose by it.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core.forward_time import keep_after

#: Weight of the prior, in tested draft tokens. A session's own counts outweigh its pool's after about this number, and
#: the counts of one position outweigh those of all positions together.
PRIOR_TOKENS = 16.0


class Acceptance:
    """Accepted and tested draft tokens by position; the weight of past rounds decays."""

    def __init__(self, keep: float) -> None:
        """`keep`: weight of the counts that is left one round later."""
        self._keep = keep
        self._accepted: list[float] = []
        self._tested: list[float] = []

    def observe(self, num_drafted: int, num_accepted: int, elapsed_rounds: int) -> None:
        """Count one round, `elapsed_rounds` after the previous one with a draft."""
        keep = keep_after(self._keep, elapsed_rounds)
        missing = num_drafted - len(self._tested)
        self._accepted = [count * keep for count in self._accepted] + [0.0] * missing
        self._tested = [count * keep for count in self._tested] + [0.0] * missing
        for position in range(min(num_accepted + 1, num_drafted)):
            self._tested[position] += 1.0
            self._accepted[position] += position < num_accepted

    def add(self, tested: Sequence[float], accepted: Sequence[float], keep: float) -> None:
        """Add expected counts by position, after the weight of the present counts has decayed to `keep`."""
        missing = len(tested) - len(self._tested)
        self._tested = [count * keep for count in self._tested] + [0.0] * missing
        self._accepted = [count * keep for count in self._accepted] + [0.0] * missing
        for position, (num_tested, num_accepted) in enumerate(zip(tested, accepted, strict=True)):
            self._tested[position] += num_tested
            self._accepted[position] += num_accepted

    @property
    def num_tested(self) -> float:
        return sum(self._tested)

    @property
    def num_accepted(self) -> float:
        return sum(self._accepted)

    @property
    def measured(self) -> float | None:
        """Accepted share of the tested tokens; None before the first."""
        return self.num_accepted / self.num_tested if self.num_tested else None

    def overall(self, prior: float) -> float:
        """Return the accepted share of the tested tokens, shrunk towards `prior` while few were tested."""
        return (self.num_accepted + prior * PRIOR_TOKENS) / (self.num_tested + PRIOR_TOKENS)

    def at(self, position: int, prior: float) -> float:
        """Return the accepted share at one position, given that the tokens before it were accepted."""
        if position >= len(self._tested):
            return prior
        return (self._accepted[position] + prior * PRIOR_TOKENS) / (self._tested[position] + PRIOR_TOKENS)
