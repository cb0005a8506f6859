"""A server in a child process: started, waited for until it is ready, asked, measured and stopped.

A subclass says how its server is started and when it is ready; that of a `PeerServer` also how it is asked, and
`bench.suites.peers.suite` sees this class alone. All coroutines run in the one event loop of the suite, so that one
client asks every server.
"""

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import process_tree

Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end in the suite's event loop."""


@dataclass(frozen=True)
class Answer:
    """One stream; times count from the moment at which its batch was sent."""

    token_ids: list[int]
    chunk_s: list[float]
    """Time at which each chunk arrived."""
    chunk_tokens: list[int]
    """Number of tokens in each chunk."""

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0]

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first chunk."""
        num_later = sum(self.chunk_tokens[1:])
        return (self.chunk_s[-1] - self.chunk_s[0]) / max(1, num_later)


class AnswerClock:
    """Collects the chunks of one stream with their times."""

    def __init__(self, began_s: float) -> None:
        """Start at `began_s`, a reading of `time.perf_counter`."""
        self._began_s = began_s
        self._token_ids: list[int] = []
        self._chunk_s: list[float] = []
        self._chunk_tokens: list[int] = []

    def take(self, token_ids: Iterable[int]) -> None:
        """Record a chunk that has just arrived; an empty one is ignored."""
        before = len(self._token_ids)
        self._token_ids += token_ids
        if len(self._token_ids) > before:
            self._chunk_s.append(time.perf_counter() - self._began_s)
            self._chunk_tokens.append(len(self._token_ids) - before)

    def answer(self, num_tokens: int) -> Answer:
        """Return the whole answer.

        Raises:
            RuntimeError: the stream ended with another number of tokens than were asked for.
        """
        if len(self._token_ids) != num_tokens:
            raise RuntimeError(f"the stream ended after {len(self._token_ids)} of {num_tokens} tokens")
        return Answer(self._token_ids, self._chunk_s, self._chunk_tokens)


def tokens_per_s(answers: Sequence[Answer]) -> float:
    """Return the tokens a second of a whole batch until the last stream's last token, prefill included."""
    return sum(len(answer.token_ids) for answer in answers) / max(answer.chunk_s[-1] for answer in answers)


_ROOT = Path(__file__).resolve().parents[2]
_START_S = 600
_STOP_S = 30
_SHOWN_CHARACTERS = 600


class ServerFailure(Exception):
    """A server did not start; the message says why in one paragraph."""


class ServerProcess(ABC):
    """One server process."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        """Describe the server; `start` starts it.

        Args:
            name: Name of the system in the rows.
            command: Program and arguments.
            environ: Variables set beside those of this process.
        """
        self.name = name
        self.start_s = 0.0
        self._command = command
        # Every server chooses its threads, or is told here: a limit that is meant for tests would hold some of them.
        inherited = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        self._environ = inherited | dict(environ or {})

    @abstractmethod
    async def _wait_until_ready(self) -> None:
        """Return once the server takes requests; raise `ServerFailure` or an error of the connection otherwise."""

    async def start(self) -> None:
        """Start the server and wait until it is ready.

        Raises:
            ServerFailure: the program cannot be run, ended instead of serving, or took too long.
        """
        began_s = time.perf_counter()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (`stop` closes it)
        try:
            # A session of its own, so that what remains of it can be ended as one group.
            self._process = await asyncio.create_subprocess_exec(
                *self._command, env=self._environ, cwd=_ROOT, start_new_session=True,
                stdin=asyncio.subprocess.PIPE, stdout=self._stdout(), stderr=self._log,
            )  # fmt: skip
        except OSError as error:
            self._log.close()
            raise ServerFailure(f"{self._command[0]} cannot be run: {error.strerror}") from error
        ended = asyncio.ensure_future(self._process.wait())
        ready = asyncio.ensure_future(self._wait_until_ready())
        try:
            await asyncio.wait({ended, ready}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                what = f"ended with exit code {ended.result()}" if ended.done() else f"was not ready in {_START_S} s"
                raise ServerFailure(f"{self._command[0]} {what}: {self._last_words()}")
            ready.result()
        except BaseException:
            await self.stop()
            raise
        finally:
            for task in (ended, ready):
                task.cancel()
        self.start_s = time.perf_counter() - began_s

    async def stop(self) -> None:
        """Stop the server and everything that it started."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STOP_S)
        finally:
            self._end_group()
            await self._process.wait()
            self._log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """Return the processor seconds used so far."""
        return process_tree.cpu_s(self.pid)

    def pss_bytes(self) -> int:
        """Return the memory in use."""
        return process_tree.pss_bytes(self.pid)

    def _stdout(self) -> object:
        """Return where the standard output goes: by default beside the errors."""
        return self._log

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        self._log.seek(0)
        return " ".join(self._log.read().split())[-_SHOWN_CHARACTERS:]


class PeerServer(ServerProcess):
    """A server that answers prompts."""

    @abstractmethod
    async def answer(self, prompts: Sequence[list[int]], num_tokens: int) -> list[Answer]:
        """Stream one greedy answer of exactly `num_tokens` tokens to each prompt, all at once; EOS ends none."""

    async def settle(self) -> None:
        """Release what the last batch left in the server; this is not measured."""
