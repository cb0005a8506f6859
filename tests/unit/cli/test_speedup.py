"""The sentence that explains a speedup, from completions with known statistics."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.cli.bench import acceptance, reason_for, round_ms, tokens_per_round
from specdec.client import Completion, GenerationStats, Usage


def completion(*, tokens: int, rounds: int, drafted: int, accepted: int, seconds: float) -> Completion:
    """Return a completion whose first round takes one second and the others `seconds` together."""
    stats = replace(
        GenerationStats.nothing(),
        num_rounds=rounds, num_draft_tokens=drafted, num_accepted_tokens=accepted, ttft_s=1.0, e2el_s=1.0 + seconds,
    )  # fmt: skip
    usage = Usage(num_prompt_tokens=1, num_output_tokens=tokens, num_cached_prompt_tokens=0)
    return Completion("session", "request", "", tuple(range(tokens)), "length", usage, stats)


ALONE = completion(tokens=11, rounds=11, drafted=0, accepted=0, seconds=0.1)  # 10 ms a step
GAINING = completion(tokens=12, rounds=5, drafted=16, accepted=8, seconds=0.08)  # 20 ms a round of 2.4 tokens
LOSING = completion(tokens=11, rounds=9, drafted=32, accepted=2, seconds=0.24)  # 30 ms a round of 1.2 tokens


def test_tokens_acceptance_and_duration_are_those_of_the_rounds() -> None:
    assert (tokens_per_round([GAINING]), acceptance([GAINING])) == (2.4, 0.5)
    assert round_ms([GAINING]) == pytest.approx(20.0)
    assert (acceptance([ALONE]), round_ms([ALONE])) == (None, pytest.approx(10.0))


@pytest.mark.parametrize(
    ("speedup", "speculative", "sentence"),
    [
        (1.2, GAINING, "gain: a round emits 2.4 tokens (50% of the draft tokens are kept) and takes as long as 2.0 "),
        (0.4, LOSING, "no gain: a round emits 1.2 tokens (6% of the draft tokens are kept) and takes as long as 3.0 "),
        (1.0, ALONE, "no gain: no draft token was proposed, "),
    ],
)
def test_the_sentence_compares_the_tokens_of_a_round_with_its_duration(
    speedup: float, speculative: Completion, sentence: str
) -> None:
    assert reason_for(speedup, [speculative], [ALONE]).startswith(sentence)
