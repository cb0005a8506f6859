"""How a draft's rounds would have gone over tokens that were committed without it.

Committed tokens x are draws of p, and given them a draft's tokens are accepted independently, each with min(1, q/p) of
its position: of all draws, min(p, q) is accepted *and* is the token that comes out, and p is what comes out. So the
chance that a round begins at each position follows from the chances before it, and with it what would have been tested
and accepted: no estimate of the tokens' own luck, no request spent on it (docs/protocol.md section 9). Token-wise rule;
block verification accepts no less. Of greedy and coupled rounds q is 1 or 0, and the rounds are those that would have
been.

Not here: q (the draft's `Score`), p (Verify's), what is concluded (`coordinator.round.routes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ExpectedRounds(NamedTuple):
    """Expected numbers over a span of tokens."""

    tested: tuple[float, ...]
    """Draft tokens tested, by their index in the round."""
    accepted: tuple[float, ...]

    @property
    def alpha(self) -> float | None:
        """Accepted share of tested tokens; None where none would have been tested."""
        num_tested = sum(self.tested)
        return sum(self.accepted) / num_tested if num_tested else None


def acceptance_of(q: Sequence[float], p: Sequence[float]) -> list[float]:
    """min(1, q/p) of committed tokens, each 0..1; p of a committed token is above 0."""
    return [min(1.0, of_draft / max(of_target, 1e-12)) for of_draft, of_target in zip(q, p, strict=True)]


def expected_rounds(acceptance: Sequence[float], gamma: int) -> ExpectedRounds:
    """Walks rounds of `gamma` draft tokens over a span whose first token began a round.

    Args:
        acceptance: of each token of the span, given that it is tested.
        gamma: at least 1.
    """
    num_tokens = len(acceptance)
    begins = [0.0] * (num_tokens + gamma + 2)
    begins[0] = 1.0
    tested, accepted = [0.0] * gamma, [0.0] * gamma
    for start in range(num_tokens):
        reach = begins[start]
        for index, position in enumerate(range(start, min(start + gamma, num_tokens))):
            tested[index] += reach
            accepted[index] += reach * acceptance[position]
            begins[position + 1] += reach * (1.0 - acceptance[position])  # corrected there, and a new round after it
            reach *= acceptance[position]
        begins[start + gamma + 1] += reach  # all accepted, then a bonus token; beyond the span it counts for nothing
    return ExpectedRounds(tuple(tested), tuple(accepted))
