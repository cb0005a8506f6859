"""A record of acceptance: accepted and tested draft tokens per position, old rounds fading.

Not here: what is chosen by it (`gamma`, `routes`).
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core.forward_time import keep_after

#: A session's own record outweighs its pool's after about this many tested draft tokens, and the record of one position
#: that of all positions together.
PRIOR_TOKENS = 16.0


class Acceptance:
    """Accepted and tested draft tokens per position, old rounds fading."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._accepted: list[float] = []
        self._tested: list[float] = []

    def observe(self, num_drafted: int, num_accepted: int, elapsed_rounds: int) -> None:
        keep = keep_after(self._keep, elapsed_rounds)
        missing = num_drafted - len(self._tested)
        self._accepted = [count * keep for count in self._accepted] + [0.0] * missing
        self._tested = [count * keep for count in self._tested] + [0.0] * missing
        for position in range(min(num_accepted + 1, num_drafted)):
            self._tested[position] += 1.0
            self._accepted[position] += position < num_accepted

    def add(self, tested: Sequence[float], accepted: Sequence[float], keep: float) -> None:
        """Adds expected numbers by position, beside which `keep` of the record is left."""
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
        """Accepted share of tested tokens; None before the first."""
        return self.num_accepted / self.num_tested if self.num_tested else None

    def overall(self, prior: float) -> float:
        """Accepted share of tested tokens; `prior` while few were tested."""
        return (self.num_accepted + prior * PRIOR_TOKENS) / (self.num_tested + PRIOR_TOKENS)

    def at(self, position: int, prior: float) -> float:
        """The share at one position, given that those before it were accepted."""
        if position >= len(self._tested):
            return prior
        return (self._accepted[position] + prior * PRIOR_TOKENS) / (self._tested[position] + PRIOR_TOKENS)
