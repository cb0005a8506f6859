"""A steady load of greedy streams, one thread each, whose outputs are known in advance.

Each stream requests the same output repeatedly, in new sessions; each answer is compared with that of an idle system.
Measurements and tests use it while replicas join, leave and die.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from specdec.client import Budgets, Client

NUM_TOKENS = 250


class SteadyLoad:
    """Streams that run while the context is open."""

    def __init__(
        self,
        endpoint: str,
        num_streams: int = 6,
        num_tokens: int = NUM_TOKENS,
        *,
        patience_s: float | None = None,
        **asked: Any,
    ) -> None:
        """Asks a quiet system for each stream's output.

        Args:
            endpoint: address of the coordinator.
            num_streams: number of concurrent streams.
            num_tokens: tokens of an output.
            patience_s: time for which a stream retries without an answer; None: the client's default.
            asked: further options of every request.
        """
        self._endpoint = endpoint
        self._budgets = Budgets() if patience_s is None else Budgets(connect_s=patience_s, resume_s=patience_s)
        self._asked = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True} | asked
        self.chunks: list[tuple[float, int, int]] = []
        """Arrival time, stream and number of tokens of each chunk."""
        self.outputs_ended = [0] * num_streams
        """Number of outputs that each stream has completed."""
        self.faults: list[str] = []
        with ThreadPoolExecutor(num_streams) as pool:
            self._expected = list(pool.map(self._stream, range(num_streams)))
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(num_streams)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Lets every stream finish the output it is at."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for_all_streams(self) -> None:
        """Wait until each stream has received another chunk or one has failed."""
        waiting, seen = set(range(len(self.outputs_ended))), len(self.chunks)
        while waiting and not self.faults:
            time.sleep(0.02)
            now = len(self.chunks)
            waiting -= {stream for _, stream, _ in self.chunks[seen:now]}
            seen = now

    def _run(self, index: int) -> None:
        while not self._stop.is_set():
            try:
                output = self._stream(index)
            except Exception as error:  # any error that a user would have seen
                self.faults.append(f"stream {index}: {error!r}")
                return
            if output != self._expected[index]:
                self.faults.append(f"stream {index}: other tokens than before")
            self.outputs_ended[index] += 1

    def _stream(self, index: int) -> list[int]:
        token_ids: list[int] = []
        with Client(self._endpoint, budgets=self._budgets) as client:
            prompt = [index + 5, 6, 7]
            with client.generate(prompt_token_ids=prompt, stream=True, seed=index, **self._asked) as stream:
                for chunk in stream:
                    self.chunks.append((time.monotonic(), index, len(chunk.token_ids)))
                    token_ids += chunk.token_ids
                session_id = stream.result().session_id
            client.delete_session(session_id)
        return token_ids
