"""A steady load of greedy streams, one thread each, whose every output is known beforehand.

Each stream asks for the same few outputs again and again, in new sessions; what came is compared with what a quiet
system gave. For tests in which replicas come, go and die.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from specdec.client import Client

NUM_TOKENS = 250


class SteadyLoad:
    """Runs while the context is open; `outputs_ended` is how far each stream has come."""

    def __init__(self, endpoint: str, num_streams: int = 6, num_tokens: int = NUM_TOKENS) -> None:
        """Asks a quiet system for each stream's output."""
        self._endpoint = endpoint
        self._num_tokens = num_tokens
        with ThreadPoolExecutor(num_streams) as pool:
            self._expected = list(pool.map(self._stream, range(num_streams)))
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(num_streams)]
        self.outputs_ended = [0] * num_streams
        self.faults: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lets every stream finish the output it is at."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        while not self._stop.is_set():
            try:
                output = self._stream(index)
            except Exception as error:  # whatever a user would have seen
                self.faults.append(f"stream {index}: {error!r}")
                return
            if output != self._expected[index]:
                self.faults.append(f"stream {index}: other tokens than before")
            self.outputs_ended[index] += 1

    def _stream(self, index: int) -> list[int]:
        token_ids: list[int] = []
        with Client(self._endpoint) as client:
            ask = {"temperature": 0, "max_new_tokens": self._num_tokens, "ignore_eos": True, "seed": index}
            with client.generate(prompt_token_ids=[index + 5, 6, 7], stream=True, **ask) as stream:
                for chunk in stream:
                    token_ids += chunk.token_ids
                session_id = stream.result().session_id
            client.delete_session(session_id)
        return token_ids
