"""How a draft's rounds would have gone over tokens that were committed without it.

Committed tokens x are draws of p, and given them a draft's tokens are accepted independently, each with min(1, q/p) of
its position: of all draws, min(p, q) is accepted *and* is the token that comes out, and p is what comes out. So the
chance that a round begins at each position follows from the chances before it, and with it what would have been tested
and accepted: no estimate of the tokens' own luck, no request spent on it (docs/protocol.md section 9). Token-wise rule;
block verification accepts no less. Of greedy and coupled rounds q is 1 or 0, and the rounds are those that would have
been.

Not here: q (the draft's `Score`), p (Verify's), what is concluded (`coordinator.round.routing_table`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specdec.types import SCORED_GAMMA, Score


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


def rounds_of(score: Score, p: Sequence[float]) -> list[Sequence[float]]:
    """Acceptance in the rounds of up to `SCORED_GAMMA` draft tokens that begin at each token of a span.

    Args:
        score: of the span.
        p: of each of its tokens.
    """
    if not score.round_lengths:
        acceptance = acceptance_of(score.q, p)
        return [acceptance[start : start + SCORED_GAMMA] for start in range(len(p))]
    rounds: list[Sequence[float]] = []
    first = 0
    for start, length in enumerate(score.round_lengths):
        rounds.append(acceptance_of(score.q[first : first + length], p[start : start + length]))
        first += length
    return rounds


def expected_rounds(rounds: Sequence[Sequence[float]]) -> ExpectedRounds:
    """Walks rounds over a span whose first token began one.

    Args:
        rounds: of the round that begins at each token of the span, acceptance of each of its draft tokens, given that
            it is tested; none where it would have had no draft.
    """
    num_tokens, gamma = len(rounds), max(map(len, rounds))
    begins = [0.0] * (num_tokens + gamma + 2)
    begins[0] = 1.0
    tested, accepted = [0.0] * gamma, [0.0] * gamma
    for start, acceptance in enumerate(rounds):
        reach = begins[start]
        for index, of_token in enumerate(acceptance):
            tested[index] += reach
            accepted[index] += reach * of_token
            begins[start + index + 1] += reach * (1.0 - of_token)  # corrected there, and a new round after it
            reach *= of_token
        # All accepted, then a bonus token; beyond the span it counts for nothing.
        begins[start + len(acceptance) + 1] += reach
    return ExpectedRounds(tuple(tested), tuple(accepted))
