"""Reads one answer from its stream: writes each chunk, stops at Ctrl-C, and reports what a silent stream waits for.

`generate` and `chat` use it. The stream itself reconnects and resumes after an interruption.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from specdec.client import Chunk, Client, Completion, Stream
from specdec.client.failures import is_without_target
from specdec.contract.errors import SpecdecError, Unavailable

#: Context manager in which Ctrl-C calls the given action.
Interrupts = Callable[[Callable[[], None]], contextlib.AbstractContextManager[None]]

#: Length of a silence after which the coordinator is asked for its targets, and of the pauses between two questions.
SILENCE_S = 2.0


def read_answer(client: Client, stream: Stream, interrupts: Interrupts, write: Callable[[Chunk], None]) -> Completion:
    """Write every chunk of a stream and return the whole output; after Ctrl-C its finish reason is "cancelled".

    Raises:
        SpecdecError: the stream failed.
    """
    with interrupts(stream.close), stream, SilenceWatch(client) as watch:
        for chunk in stream:
            watch.heard()
            write(chunk)
    return stream.result()


class SilenceWatch:
    """Reports a lost part of the system while a stream is silent. A thread of its own runs while the context is open.

    Silence alone means nothing, because reading a long prompt is silent as well. So the watch asks the coordinator, on
    the client's connection, which targets are alive.
    """

    def __init__(
        self, client: Client, *, silence_s: float = SILENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._silence_s = silence_s
        self._clock = clock
        self._heard_at = clock()
        self._has_text = False
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="silence watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the watch. A question under way is not awaited, and its answer is dropped."""
        self._has_ended.set()

    def heard(self) -> None:
        """Note that the stream has brought a chunk."""
        self._has_text = True
        self._heard_at = self._clock()

    def _watch(self) -> None:
        reported_at = self._heard_at - 1.0
        while not self._has_ended.wait(self._silence_s):
            heard_at = self._heard_at
            if reported_at == heard_at or self._clock() - heard_at < self._silence_s:
                continue
            lost = self._lost_part()
            if lost and heard_at == self._heard_at and not self._has_ended.is_set():
                reported_at = heard_at  # one report per silence
                # In a terminal the text may have left the cursor in the middle of a line.
                start = "\n" if self._has_text and sys.stderr.isatty() else ""
                print(f"{start}{lost} lost, waiting for it to come back", file=sys.stderr, flush=True)

    def _lost_part(self) -> str:
        """Return the lost part that tokens need: "coordinator" or "target"; "" if none is known to be lost."""
        try:
            pools = self._client.info().pools
        except Unavailable as error:
            if error.reason == "COORDINATOR_UNAVAILABLE":
                return "coordinator"
            return "target" if is_without_target(error) else ""  # the coordinator has just started
        except SpecdecError:
            return ""
        return "" if any(pool.role == "target" and pool.replicas for pool in pools) else "target"
