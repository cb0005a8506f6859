"""`make demo-pair`: Qwen2.5-Coder 1.5B answers with 0.5B as its draft, and Transformers gives the same answers.

Both sides answer with the draft model and without. Transformers follows once specdec has stopped: in float32 the pair
takes 8 GB of memory, and both at once would take 16. Not a benchmark: a few short answers on whatever this machine is
doing; `python -m bench peers` measures. It stops everything it started. Needs the packages that `make demo-pair`
installs.
"""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from one_machine import TransformersPeer, print_answer, with_system

from bench.harness.report import progress, waiting
from bench.systems.real_models import QWEN_DRAFT, QWEN_TARGET
from specdec.cli.closing_line import closing_line, tokens_per_s
from specdec.cli.terminal import TokenWriter, wants_colour
from specdec.client import Client

PROMPTS = (
    "def quicksort(items):\n",
    "import csv\n\n\ndef read_rows(path):\n",
)
MAX_NEW_TOKENS = 48


@dataclass
class Way:
    """One way to the texts, with what it gave for each prompt."""

    name: str
    texts: list[list[int]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def add(self, token_ids: list[int], rate: float) -> None:
        """Keep one answer and its tokens a second."""
        self.texts.append(token_ids)
        self.rates.append(rate)


def main() -> int:
    try:
        models = {model.name: model.path() for model in (QWEN_TARGET, QWEN_DRAFT)}
        for name, path in models.items():
            print(f"{name}: {path}", flush=True)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    ways = [Way("specdec, with the draft"), Way("specdec, alone"), Way("Transformers, with the draft"),
            Way("Transformers, alone")]  # fmt: skip
    prompts: list[tuple[int, ...]] = []
    print("starting draft, target and coordinator …", flush=True)
    target, draft = models.values()
    status = with_system(["--target", str(target), "--draft", str(draft)], partial(ask_specdec, ways[:2], prompts))
    if status == 0:
        ask_transformers(target, draft, ways[2:], prompts)
        status = print_table(ways)
    return status


def ask_specdec(ways: list[Way], prompts: list[tuple[int, ...]], endpoint: str) -> int:
    """Stream an answer to each prompt with the draft, then have it made without; note the prompts' token ids."""
    writer = TokenWriter(sys.stdout, coloured=wants_colour(sys.stdout, os.environ))
    with Client(endpoint) as client:
        print(f"\n{writer.legend()}")
        for prompt in PROMPTS:
            print(f"\n{prompt}", end="", flush=True)
            drafted = print_answer(client, writer, prompt, max_new_tokens=MAX_NEW_TOKENS)
            print(f"\n\n{closing_line(drafted)}", flush=True)
            alone = client.generate(prompt, temperature=0, max_new_tokens=MAX_NEW_TOKENS, mode="off")
            client.delete_session(alone.session_id)
            for way, answer in zip(ways, (drafted, alone), strict=True):
                way.add(list(answer.token_ids), tokens_per_s(answer))
            prompts.append(tuple(client.tokenize(prompt)))
    return 0


def ask_transformers(target: Path, draft: Path, ways: list[Way], prompts: list[tuple[int, ...]]) -> None:
    """Have `generate()` answer the same prompts, with the draft as its assistant model and without."""
    with waiting("loading the pair in Transformers"):
        peer = TransformersPeer(target, draft)
    with progress("Transformers answers the same prompts", len(prompts) * len(ways)) as advance:
        for prompt in prompts:
            for way, is_assisted in zip(ways, (True, False), strict=True):
                way.add(*peer.answer(prompt, MAX_NEW_TOKENS, is_assisted=is_assisted))
                advance()


def print_table(ways: list[Way]) -> int:
    """Print the tokens a second of every way and whether all texts are the same; return the exit code."""
    base = statistics.mean(ways[-1].rates)
    print(f"\n{'':30} tokens/s   beside Transformers alone")
    for way in ways:
        mean = statistics.mean(way.rates)
        print(f"{way.name:30} {mean:8.1f}   {mean / base:.2f}x")
    same = all(way.texts == ways[0].texts for way in ways)
    print("\nAll texts are the same, token for token." if same else "\nerror: the texts differ")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
