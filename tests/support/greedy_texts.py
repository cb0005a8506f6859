"""Greedy texts of Hugging Face's `generate()` in float32, and the comparison with them up to printed ties."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Difference of two logits of the oracle below which rounding may decide between their tokens.
TIE = 1e-4


def generate(oracle: torch.nn.Module, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the greedy continuation of a prompt, end tokens ignored."""
    ids = torch.tensor([list(prompt)])
    output = oracle.generate(ids, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    return output[0, len(prompt) :].tolist()


def greedy_of_whole_passes(oracle: torch.nn.Module, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the greedy continuation where each token comes from a pass over all tokens before it, without a cache."""
    ids = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(oracle(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def require_same_but_for_ties(
    oracle: torch.nn.Module, prompt: Sequence[int], expected: Sequence[int], output: Sequence[int]
) -> None:
    """Fail unless a text is the expected one up to its first tie, which is printed: what follows is another text."""
    assert len(output) == len(expected)
    if list(output) == list(expected):
        return
    first = next(index for index, pair in enumerate(zip(output, expected, strict=True)) if pair[0] != pair[1])
    with torch.no_grad():
        logits = oracle(torch.tensor([[*prompt, *expected[:first]]])).logits[0, -1]
    both = logits[[expected[first], output[first]]].tolist()
    print(f"first difference at output token {first}: logits {both}")
    assert abs(both[0] - both[1]) < TIE
