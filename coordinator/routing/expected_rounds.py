"""The expected rounds of a draft over tokens that were committed without it.

Committed tokens x are draws from p. Given x, the draft's tokens are accepted independently, each with probability
min(1, q/p) at its position: a token is accepted and emitted with probability min(p, q), and emitted with probability p.
So the probability that a round begins at a position follows from those of the positions before it, and the expected
numbers of tested and accepted tokens follow from it. This needs no extra draws and no request (docs/protocol.md section
9). The rule is token-wise; block verification accepts at least as many. In greedy and coupled rounds q is 1 or 0, and
the expected rounds are exact.

q comes from the draft's `Score` and p from the verification; `coordinator.round.routing_table` learns from the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specdec.contract.types import SCORED_GAMMA, Score


class ExpectedRounds(NamedTuple):
    """Expected numbers of draft tokens over a span of tokens, by their index in the round."""

    tested: tuple[float, ...]
    accepted: tuple[float, ...]

    @property
    def alpha(self) -> float | None:
        """Accepted share of tested tokens; None if no token would have been tested."""
        num_tested = sum(self.tested)
        return sum(self.accepted) / num_tested if num_tested else None


def acceptance_of(q: Sequence[float], p: Sequence[float]) -> list[float]:
    """Return min(1, q/p) of each committed token; p of a committed token is above 0."""
    return [min(1.0, of_draft / max(of_target, 1e-12)) for of_draft, of_target in zip(q, p, strict=True)]


def rounds_of(score: Score, p: Sequence[float]) -> list[Sequence[float]]:
    """Return the acceptance of each draft token of the round that would begin at each token of a span.

    Args:
        score: the draft's score of the span. Rounds have up to `SCORED_GAMMA` draft tokens.
        p: target probability of each of its tokens.
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
    """Return the expected rounds over a span, whose first token begins one.

    Args:
        rounds: for the round that begins at each token of the span, the acceptance of each of its draft tokens, given
            that it is tested; empty if the round would have had no draft.
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
            begins[start + index + 1] += reach * (1.0 - of_token)  # rejected: a new round begins after its correction
            reach *= of_token
        # All accepted: a new round begins after the bonus token. Positions beyond the span are not counted.
        begins[start + len(acceptance) + 1] += reach
    return ExpectedRounds(tuple(tested), tuple(accepted))
