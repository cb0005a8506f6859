"""`make demo`: three services as processes, one completion with its tokens' sources, and the same without drafting.

Not a benchmark: two short answers on whatever this machine is doing; `bench/` measures. Run it with the environment's
own Python, with or without a terminal; it stops everything it started.
"""

from __future__ import annotations

import os
import sys

from one_machine import print_answer, with_system

from specdec.cli.terminal import TokenWriter, closing_line, tokens_per_s, wants_colour
from specdec.client import Client, Completion

PROMPT = 'def read_lines(path, encoding="utf-8"):\n    """'
MAX_NEW_TOKENS = 96
GAMMA = 4  # fixed: a machine on which drafting does not pay should show that too, instead of not drafting


def main() -> int:
    print("Starting draft, target and coordinator as separate processes …", flush=True)
    return with_system([], show)


def show(endpoint: str) -> int:
    """Streams the same greedy completion with and without a draft; returns the exit code."""
    writer = TokenWriter(sys.stdout, coloured=wants_colour(sys.stdout, os.environ))
    with Client(endpoint) as client:
        for mode in ("rejection", "off"):  # the first pass of a process is slower; let neither side pay for it
            first = client.generate(PROMPT, mode=mode, gamma=GAMMA, temperature=0, max_new_tokens=8)
            client.delete_session(first.session_id)
        print(f"\nDrafted by one process, verified by another, decided by a third.  {writer.legend()}\n")
        speculative = stream(client, writer, "rejection")
        print("\nThe same prompt, target-only:\n")
        target_only = stream(client, writer, "off")
    speedup = tokens_per_s(speculative) / max(tokens_per_s(target_only), 1e-9)
    print(
        f"\nspeculative {tokens_per_s(speculative):.1f} tokens/s   target-only {tokens_per_s(target_only):.1f} tokens/s"
        f"   speedup {speedup:.2f}x"
    )
    same = speculative.token_ids == target_only.token_ids
    print("Both texts are the same, token for token." if same else "error: the two texts differ")
    return 0 if same else 1


def stream(client: Client, writer: TokenWriter, mode: str) -> Completion:
    """Prints one greedy completion as it comes, then its closing line."""
    print(PROMPT, end="", flush=True)
    completion = print_answer(client, writer, PROMPT, mode=mode, gamma=GAMMA, max_new_tokens=MAX_NEW_TOKENS)
    print(f"\n\n{closing_line(completion)}")
    return completion


if __name__ == "__main__":
    sys.exit(main())
