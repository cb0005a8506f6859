"""Transformers as the suite `peers` measures it: `generate()` in a child process that streams its tokens.

Streams that begin together are one padded batch. With a draft model they are answered one after another, because
assisted generation takes one sequence at a time. The same child says how close two tokens were, which tells a tie from
a difference. `python -m bench.systems.transformers_server` is the child.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from bench.harness.workload import GAMMA, NUM_THREADS
from bench.systems.process import Answer, AnswerClock, PeerServer, ServerFailure
from bench.systems.transformers import draft_constantly, load_without_eos


class TransformersServer(PeerServer):
    """A target and, with drafts, an assistant model."""

    def __init__(self, name: str, target: Path, draft: Path | None, dtype: str) -> None:
        """Describe the child.

        Args:
            name: Name of the system in the rows.
            target: A checkpoint directory.
            draft: Likewise; None generates without an assistant.
            dtype: Name of a torch dtype.
        """
        command = [sys.executable, "-m", "bench.systems.transformers_server", "--target", str(target), "--dtype", dtype]
        command += ["--draft", str(draft)] if draft else []
        threads = str(NUM_THREADS)
        environ = {"OMP_NUM_THREADS": threads, "TRANSFORMERS_VERBOSITY": "error"}
        super().__init__(name, [*command, "--threads", threads, "--gamma", str(GAMMA)], environ)

    async def _wait_until_ready(self) -> None:
        if not await self._read_line():
            raise ServerFailure(f"Transformers did not start: {self._last_words()}")

    async def answer(self, prompts: Sequence[list[int]], num_tokens: int) -> list[Answer]:
        began_s = time.perf_counter()
        clocks = [AnswerClock(began_s) for _ in prompts]
        async for event in self._ask({"prompts": list(prompts), "num_tokens": num_tokens}):
            for place, token_ids in event.items():
                clocks[int(place)].take(token_ids)
        return [clock.answer(num_tokens) for clock in clocks]

    async def logit_gap(self, token_ids: list[int], first: int, second: int) -> float:
        """Return how much higher the target's logit of one token is than that of another after a text."""
        (gap,) = [event async for event in self._ask({"token_ids": token_ids, "first": first, "second": second})]
        return float(gap)

    async def _ask(self, request: Any) -> AsyncIterator[Any]:
        """Send a request and yield what the child answers until it says `null`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        while (event := json.loads(await self._read_line() or "null")) is not None:
            yield event

    async def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.readline()

    def _stdout(self) -> int:
        return asyncio.subprocess.PIPE


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
