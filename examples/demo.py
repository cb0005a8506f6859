"""`make demo`: three services as processes, one completion with its tokens' sources, and the same drafted otherwise.

Not a benchmark: a few short answers on whatever this machine is doing; `bench/` measures. Run it with the environment's
own Python, with or without a terminal; it stops everything it started.
"""

from __future__ import annotations

import os
import statistics
import sys
from typing import NamedTuple

from one_machine import print_answer, with_system

from specdec.cli.terminal import TokenWriter, closing_line, tokens_per_s, wants_colour
from specdec.client import Client, Completion, GenerateOptions

PROMPT = 'def read_lines(path, encoding="utf-8"):\n    """'
MAX_NEW_TOKENS = 96
GAMMA = 4  # fixed: a machine on which drafting does not pay should show that too, instead of not drafting
NUM_TURNS = 5
"""Each way of drafting answers so many times, by turns: the machine's drift hits all alike."""


class Way(NamedTuple):
    """One way to the same text."""

    name: str
    note: str
    options: GenerateOptions


TARGET_ONLY = Way("target-only", "nobody drafts", {"mode": "off"})
WAYS = (
    TARGET_ONLY,
    Way("code", "a small model in a process of its own", {"draft_pool": "code", "gamma": GAMMA}),
    Way("eagle3", "a head on the target: one trip a round", {"draft_pool": "eagle3", "gamma": GAMMA}),
    Way("suffix", "what was said before, here this very text: no model at all", {"draft_pool": "suffix"}),
)
DRAFTS = ("code=models/demo/draft", "eagle3:models/demo/eagle3", "suffix")


def main() -> int:
    print("Starting draft, target and coordinator as separate processes …", flush=True)
    return with_system([word for draft in DRAFTS for word in ("--draft", draft)], show)


def show(endpoint: str) -> int:
    """Streams a greedy completion, then has it made in every way, by turns; returns the exit code."""
    writer = TokenWriter(sys.stdout, coloured=wants_colour(sys.stdout, os.environ))
    with Client(endpoint) as client:
        for way in WAYS:  # the first pass of a process is slower; let no side pay for it
            complete(client, way)
        print(f"\nDrafted by one process, verified by another, decided by a third.  {writer.legend()}\n")
        print(PROMPT, end="", flush=True)
        options = WAYS[1].options
        streamed = print_answer(client, writer, PROMPT, max_new_tokens=MAX_NEW_TOKENS, **options)
        print(f"\n\n{closing_line(streamed)}\n\nThe same {NUM_TURNS} times more, by turns:\n", flush=True)
        turns = [[complete(client, way) for way in WAYS] for _ in range(NUM_TURNS)]
    print_table(turns)
    texts = {completion.token_ids for turn in turns for completion in turn} | {streamed.token_ids}
    print("\nAll texts are the same, token for token." if len(texts) == 1 else "\nerror: the texts differ")
    return 0 if len(texts) == 1 else 1


def complete(client: Client, way: Way) -> Completion:
    """One greedy completion; its session is deleted."""
    completion = client.generate(PROMPT, temperature=0, max_new_tokens=MAX_NEW_TOKENS, **way.options)
    client.delete_session(completion.session_id)
    return completion


def print_table(turns: list[list[Completion]]) -> None:
    """Medians of every way: tokens a round and a second, and the latter beside target-only in the same turn."""
    print("drafted by   tokens a round   tokens/s   speedup")
    for index, way in enumerate(WAYS):
        completions = [turn[index] for turn in turns]
        rate = statistics.median(map(tokens_per_s, completions))
        speedup = statistics.median(tokens_per_s(turn[index]) / max(tokens_per_s(turn[0]), 1e-9) for turn in turns)
        per_round = completions[0].usage.num_output_tokens / completions[0].stats.num_rounds
        print(f"{way.name:11} {per_round:16.2f} {rate:10.0f} {speedup:8.2f}x   {way.note}")


if __name__ == "__main__":
    sys.exit(main())
