"""A GGUF file behind our client, and as Transformers reads the same file by itself. Called by `tests/real`.

Target and draft are the same file: no smaller relative exists, and every round is drafted, verified and decided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.systems.ours import RunningSystem
from specdec.client import Client

#: Logits this close may change places between one step and many in one: all is float32, but sums have their order.
TIE = 1e-3

#: No blanks before digits: SmolLM2 sees each digit by itself, which Transformers' reading of its file does not know.
ODD_TEXTS = [
    "", " ", "  a", "Hello, world!", "e\u0301 é ß 漢字 العربية", "\u2581 \xa0 \u200b\r\n\t\x00", "x\n\n\n  y",
    "a" * 300, "\U0001f468\u200d\U0001f469\u200d\U0001f467 👍🏽 🏳️", "<|im_start|>user\nhi<|im_end|>\n",
    "it's we'll I'D", "1234.5",
]  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A model behind our client and as Transformers reads the same file by itself."""

    path: Path
    client: Client
    reference: PreTrainedModel

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """Transformers' own greedy tokens, an end token included."""
        inputs = torch.tensor([list(prompt)])
        with torch.inference_mode():
            output = self.reference.generate(
                inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=max_new_tokens
            )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    def assert_greedy(self, prompt: Sequence[int], ours: Sequence[int], max_new_tokens: int) -> None:
        """Ours are the tokens of `generate()`, up to where its two likeliest tokens are as good as tied."""
        theirs = self.generate(prompt, max_new_tokens)
        if list(ours) == theirs:
            return
        place = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        assert place is not None, f"{len(ours)} tokens, not {len(theirs)}"
        with torch.inference_mode():
            logits = self.reference(torch.tensor([[*prompt, *theirs[:place]]])).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        assert first - second < TIE, (
            f"token {place} is {ours[place]}, not {theirs[place]}, {first - second:.2g} likelier"
        )


@contextmanager
def serve(path: Path) -> Iterator[Served]:
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with RunningSystem(path, path, dtype="float32") as system:
        yield Served(path, system.client, reference)
