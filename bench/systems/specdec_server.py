"""specdec as the suite `peers` measures it: `specdec up` in a child process, asked over gRPC by the SDK."""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.systems.process import Answer, AnswerClock, PeerServer, ServerFailure
from specdec.client import AsyncClient

_READY = "ready grpc="


class SpecdecServer(PeerServer):
    """The whole system: a target, a coordinator and, where there is a draft model, a draft service."""

    def __init__(
        self,
        name: str,
        target: Path,
        draft: Path | None,
        dtype: str,
        flags: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the system; gamma and threads are what `specdec up` chooses by itself.

        Args:
            name: Name of the system in the rows.
            target: A checkpoint directory or a GGUF file.
            draft: Likewise; None serves the target alone.
            dtype: As `specdec up --dtype` takes it.
            flags: Further flags of `specdec up`.
            environ: Variables set beside those of this process.
        """
        draft_flags = ["--draft", str(draft)] if draft else ["--replicas-draft", "0"]
        command = [sys.executable, "-m", "specdec.cli", "up", "--target", str(target), *draft_flags]
        command += ["--listen", "127.0.0.1:0", "--device", "cpu", "--dtype", dtype, *flags]
        super().__init__(name, command, environ)
        self._mode = {} if draft else {"mode": "off"}
        self._sessions: list[str] = []

    async def _wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        if not line.startswith(_READY):
            raise ServerFailure(f"specdec up did not start: {self._last_words()}")
        self._client = AsyncClient(line.split()[1].removeprefix("grpc="))

    async def answer(self, prompts: Sequence[list[int]], num_tokens: int) -> list[Answer]:
        began_s = time.perf_counter()
        return list(await asyncio.gather(*(self._stream(prompt, num_tokens, began_s) for prompt in prompts)))

    async def settle(self) -> None:
        """Delete the sessions of the last batch."""
        await asyncio.gather(*map(self._client.delete_session, self._sessions))
        self._sessions.clear()

    async def stop(self) -> None:
        if hasattr(self, "_client"):
            await self._client.close()
        await super().stop()

    async def _stream(self, prompt: list[int], num_tokens: int, began_s: float) -> Answer:
        clock = AnswerClock(began_s)
        stream = self._client.generate(
            prompt_token_ids=prompt, stream=True, max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True,
            **self._mode,
        )  # fmt: skip
        async with stream:
            async for chunk in stream:
                clock.take(chunk.token_ids)
            self._sessions.append(stream.session_id)
        return clock.answer(num_tokens)

    def _stdout(self) -> int:
        return asyncio.subprocess.PIPE
