"""`make demo-real`: SmolLM2-135M-Instruct answers in a chat, and Transformers' `generate()` answers the same beside it.

A few short answers on a machine that may be busy; `python -m bench real` measures. It stops every process it started.
Needs `make real`.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

from one_machine import print_answer, with_system

from bench.real_models import smollm2
from specdec.checkpoints.locate import locate_checkpoint
from specdec.cli.terminal import TokenWriter, closing_line, tokens_per_s, wants_colour
from specdec.client import ChatMessage, Client
from specdec.errors import SpecdecError

QUESTIONS = ("What is rain, in two sentences?", "And snow?", "Which of them is colder? 🌨️")
MAX_NEW_TOKENS = 64


def main() -> int:
    try:
        model = smollm2()
        print(f"{model.name}: converting it the first time, then starting target and coordinator …", flush=True)
        checkpoint = locate_checkpoint(model)
    except (FileNotFoundError, SpecdecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return with_system(["--target", str(model), "--replicas-draft", "0"], partial(show, checkpoint))


def show(checkpoint: Path, endpoint: str) -> int:
    """Hold a conversation of a few turns, each answered twice; return the exit code."""
    writer = TokenWriter(sys.stdout, coloured=wants_colour(sys.stdout, os.environ))
    peer = Peer(checkpoint)
    messages: list[ChatMessage] = []
    same, ours, theirs = True, [], []
    with Client(endpoint) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            print(f"\n> {question}")
            # Each question asks with the whole conversation, as the peer does.
            answer = print_answer(client, writer, messages=messages, max_new_tokens=MAX_NEW_TOKENS)
            token_ids, rate = peer.answer(client.tokenize(messages=messages))
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


class Peer:
    """Answers with the same checkpoint in Transformers, in float32 and in this process."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def answer(self, prompt: tuple[int, ...]) -> tuple[list[int], float]:
        """Return greedy token ids, the end token included, and tokens per second."""
        inputs = self._torch.tensor([prompt])  # [1, T]
        began = time.perf_counter()
        with self._torch.inference_mode():
            output = self._model.generate(
                inputs,
                attention_mask=self._torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=MAX_NEW_TOKENS,
            )
        token_ids = output[0, len(prompt) :].tolist()
        return token_ids, len(token_ids) / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
