"""`make demo-real`: SmolLM2-135M-Instruct answers in a chat, and Transformers' `generate()` answers the same beside it.

A few short answers on a machine that may be busy; `python -m bench real` measures. It stops every process it started.
Needs `make real`.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from one_machine import TransformersPeer, print_answer, with_system

from bench.harness.report import waiting
from bench.systems.real_models import SMOLLM2
from specdec.cli.closing_line import closing_line, tokens_per_s
from specdec.cli.terminal import TokenWriter, wants_colour
from specdec.client import ChatMessage, Client

QUESTIONS = ("What is rain, in two sentences?", "And snow?", "Which of them is colder? 🌨️")
MAX_NEW_TOKENS = 64


def main() -> int:
    try:
        model = SMOLLM2.path()
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("starting target and coordinator …", flush=True)
    return with_system(["--target", str(model), "--replicas-draft", "0"], partial(show, model))


def show(model: Path, endpoint: str) -> int:
    """Hold a conversation of a few turns, each answered twice; return the exit code."""
    writer = TokenWriter(sys.stdout, coloured=wants_colour(sys.stdout, os.environ))
    with waiting("loading the file in Transformers"):
        peer = TransformersPeer(model)
    messages: list[ChatMessage] = []
    same, ours, theirs = True, [], []
    with Client(endpoint) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            print(f"\n> {question}")
            # Each question asks with the whole conversation, as the peer does.
            answer = print_answer(client, writer, messages=messages, max_new_tokens=MAX_NEW_TOKENS)
            token_ids, rate = peer.answer(client.tokenize(messages=messages), MAX_NEW_TOKENS)
            print(f"\n{closing_line(answer)}\nTransformers: {rate:.1f} tokens/s", flush=True)
            ours.append(tokens_per_s(answer))
            theirs.append(rate)
            same = same and list(answer.token_ids) == token_ids
            messages.append({"role": "assistant", "content": answer.text})
    mean_ours, mean_theirs = (sum(rates) / len(rates) for rates in (ours, theirs))
    print(
        f"\nspecdec {mean_ours:.1f} tokens/s   Transformers {mean_theirs:.1f} tokens/s"
        f"   {mean_ours / mean_theirs:.2f}x, both in float32"
    )
    print("Both said the same, token for token." if same else "error: the answers differ")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
