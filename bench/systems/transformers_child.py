"""The child of `bench.systems.transformers_server`: answers one JSON request a line with several JSON lines.

A line is an object of the new tokens by the place of their prompt, a number, or `null` after the last.
"""

import argparse
import json
import sys
from typing import Any

from bench.systems.transformers import draft_constantly, load_without_eos


class Generator:
    """A target and perhaps a draft in this process."""

    def __init__(self, target: str, draft: str | None, dtype: str, gamma: int) -> None:
        """Load the models; with a draft, `gamma` tokens are drafted a round."""
        self._target = load_without_eos(target, dtype)
        self._draft = None if draft is None else load_without_eos(draft, dtype)
        if self._draft is not None:
            draft_constantly(self._draft, gamma)

    def answer(self, prompts: list[list[int]], num_tokens: int) -> None:
        """Generate greedily for prompts of one length and print the tokens as they are made."""
        if self._draft is None:
            self._generate(prompts, 0, num_tokens)
        else:
            for place, prompt in enumerate(prompts):
                self._generate([prompt], place, num_tokens, assistant_model=self._draft)

    def logit_gap(self, token_ids: list[int], first: int, second: int) -> None:
        """Print the difference of two logits of the token after a text."""
        import torch

        with torch.inference_mode():
            logits = self._target(torch.tensor([token_ids])).logits[0, -1]  # [V]
        say(float(logits[first] - logits[second]))

    def _generate(self, prompts: list[list[int]], first_place: int, num_tokens: int, **options: Any) -> None:
        import torch

        inputs = torch.tensor(prompts)  # [B, T]
        with torch.inference_mode():
            self._target.generate(
                inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=num_tokens,
                streamer=_Streamer(first_place), **options,
            )  # fmt: skip


class _Streamer:
    """Prints what `generate` puts, but the prompt, which it puts first."""

    def __init__(self, first_place: int) -> None:
        self._first_place = first_place
        self._has_prompt = False

    def put(self, tokens: Any) -> None:
        """Print one step: a token of each sequence, or the tokens of a round of the only one."""
        if self._has_prompt:
            # [B] in plain generation, [1, n] in assisted.
            rows = tokens.tolist() if tokens.dim() == 2 else tokens.unsqueeze(1).tolist()
            say({self._first_place + place: row for place, row in enumerate(rows)})
        self._has_prompt = True

    def end(self) -> None:
        """Called by `generate` after the last token."""


def say(value: Any) -> None:
    """Print one JSON line."""
    print(json.dumps(value), flush=True)


def main() -> None:
    """Answer one request a line until the input ends."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--gamma", type=int, required=True)
    asked = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(asked.threads)
    generator = Generator(asked.target, asked.draft, asked.dtype, asked.gamma)
    say("ready")
    for line in sys.stdin:
        request = json.loads(line)
        (generator.answer if "prompts" in request else generator.logit_gap)(**request)
        say(None)


if __name__ == "__main__":
    main()
