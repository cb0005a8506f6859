"""Transformers as the suite `peers` measures it: `generate()` in a child process that streams its tokens.

Streams that begin together are one padded batch. With a draft model they are answered one after another, because
assisted generation takes one sequence at a time. The same child says how close two tokens were, which tells a tie from
a difference. `python -m bench.systems.transformers_child` is the child.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from bench.harness.workload import GAMMA, NUM_THREADS
from bench.systems.answers import Answer, AnswerClock
from bench.systems.process import PeerServer, ServerFailure


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
        command = [sys.executable, "-m", "bench.systems.transformers_child", "--target", str(target), "--dtype", dtype]
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
