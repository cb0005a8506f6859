"""`make demo`: starts the services as processes, streams one completion with its tokens' sources, and compares drafts.

This is not a benchmark: a few short answers on a machine that may be busy; `bench/` measures. Run it with the Python of
the environment, with or without a terminal. It stops everything that it started.
"""

from __future__ import annotations

import os
import statistics
import sys
from typing import NamedTuple

from one_machine import print_answer, with_system

from specdec.cli.bench import GAIN, reason_for, round_ms, tokens_per_round
from specdec.cli.closing_line import closing_line, tokens_per_s
from specdec.cli.terminal import TokenWriter, wants_colour
from specdec.client import Client, Completion, GenerateOptions

PROMPT = 'def read_lines(path, encoding="utf-8"):\n    """'
MAX_NEW_TOKENS = 96
GAMMA = 4  # fixed, so that a draft that does not pay on this machine is shown instead of left out
NUM_TURNS = 5
"""Number of answers of each kind of draft, in turns, so that drift of the machine affects all alike."""


class Way(NamedTuple):
    """One way to the same text."""

    name: str
    note: str
    options: GenerateOptions


TARGET_ONLY = Way("target-only", "no drafts", {"mode": "off"})
STREAMED = Way(
    "eagle3", "a head on the target: drafts in the call that verifies", {"draft_pool": "eagle3", "gamma": GAMMA}
)
WAYS = (
    TARGET_ONLY,
    STREAMED,
    Way("suffix", "text that followed before, here this very text: no model", {"draft_pool": "suffix"}),
    Way("code", "a small model in a process of its own: one more call a round", {"draft_pool": "code", "gamma": GAMMA}),
)
DRAFTS = ("code=models/demo/draft", "eagle3:models/demo/eagle3", "suffix")


def main() -> int:
    print("Starting draft, target and coordinator as separate processes …", flush=True)
    return with_system([word for draft in DRAFTS for word in ("--draft", draft)], show)


def show(endpoint: str) -> int:
    """Stream a greedy completion, then have it made in every way, in turns; return the exit code."""
    writer = TokenWriter(sys.stdout, coloured=wants_colour(sys.stdout, os.environ))
    with Client(endpoint) as client:
        for way in WAYS:  # the first pass of a process is slower; no way is to pay for it
            complete(client, way)
        print(f"\nDrafted by a head, verified by the target, token by token.  {writer.legend()}\n")
        print(PROMPT, end="", flush=True)
        streamed = print_answer(client, writer, PROMPT, max_new_tokens=MAX_NEW_TOKENS, **STREAMED.options)
        print(
            f"\n\n{closing_line(streamed)}\n\nThe same text {NUM_TURNS} times more in every way, in turns:\n",
            flush=True,
        )
        turns = [[complete(client, way) for way in WAYS] for _ in range(NUM_TURNS)]
    print_table(turns)
    texts = {completion.token_ids for turn in turns for completion in turn} | {streamed.token_ids}
    print("\nAll texts are the same, token for token." if len(texts) == 1 else "\nerror: the texts differ")
    return 0 if len(texts) == 1 else 1


def complete(client: Client, way: Way) -> Completion:
    """Return one greedy completion. Its session is deleted."""
    completion = client.generate(PROMPT, temperature=0, max_new_tokens=MAX_NEW_TOKENS, **way.options)
    client.delete_session(completion.session_id)
    return completion


def print_table(turns: list[list[Completion]]) -> None:
    """Print medians of every way, and for each that gains nothing why this pair cannot gain there."""
    print("drafted by   tokens a round   ms a round   tokens/s   speedup")
    reasons = []
    for index, way in enumerate(WAYS):
        completions, alone = [turn[index] for turn in turns], [turn[0] for turn in turns]
        rate = statistics.median(map(tokens_per_s, completions))
        speedup = statistics.median(tokens_per_s(turn[index]) / max(tokens_per_s(turn[0]), 1e-9) for turn in turns)
        cells = f"{tokens_per_round(completions):16.2f} {round_ms(completions):12.2f} {rate:10.0f} {speedup:8.2f}x"
        print(f"{way.name:11} {cells}   {way.note}")
        if way is not TARGET_ONLY and speedup < GAIN:
            reasons.append(f"{way.name}: {reason_for(speedup, completions, alone)}")
    for reason in reasons:
        print(f"\n{reason}. A step of this small target costs as little as a call; larger targets gain here.")


if __name__ == "__main__":
    sys.exit(main())
