"""Comparison of the texts that servers gave: equal, tied, or different.

Two texts are tied where they first differ at two tokens whose logits in the reference model lie within `TIE`: every
server sums in an order of its own, so either token is right. Called by `bench.suites.peers.suite`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum

#: Largest difference of two logits that the order of float32 sums may turn round.
TIE = 1e-3

LogitGap = Callable[[list[int], int, int], float]


class Match(StrEnum):
    """Result of comparing a text with the reference's."""

    EQUAL = "equal"
    TIED = "tied"
    DIFFERENT = "different"


def first_difference(text: Sequence[int], reference: Sequence[int]) -> int | None:
    """Return the first place at which two token sequences differ; None where one begins with the other."""
    return next((place for place, pair in enumerate(zip(text, reference, strict=False)) if pair[0] != pair[1]), None)


def compare(prompt: list[int], text: list[int], reference: list[int], logit_gap: LogitGap) -> Match:
    """Compare a greedy text with the reference's.

    Args:
        prompt: Token ids that both continue.
        text: Tokens of a server.
        reference: Tokens of the reference.
        logit_gap: Returns how much higher the reference's logit of one token is than that of another after a text.
    """
    place = first_difference(text, reference)
    if place is None:
        return Match.EQUAL if len(text) == len(reference) else Match.DIFFERENT
    gap = logit_gap([*prompt, *reference[:place]], reference[place], text[place])
    return Match.TIED if abs(gap) < TIE else Match.DIFFERENT


def count_matches(
    prompts: Sequence[list[int]], texts: Sequence[list[int]], references: Sequence[list[int]], logit_gap: LogitGap
) -> Counter[Match]:
    """Return how many texts are equal to the reference's, tied with it, and different."""
    triples = zip(prompts, texts, references, strict=True)
    return Counter(compare(prompt, text, reference, logit_gap) for prompt, text, reference in triples)
