"""Says what a silent stream waits for, where it waits for a part of the system that is lost.

Silence alone says nothing: a long prompt is read in silence too. So the coordinator is asked, on the client's own
connection, which targets are alive. Not here: the stream, which reconnects and resumes by itself. Called by `answer`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from specdec.client import Client
from specdec.client.failures import is_without_target
from specdec.errors import SpecdecError, Unavailable

#: A stream that has been silent for so long is asked about, and again as often.
PATIENCE_S = 2.0


class SilenceWatch:
    """Watches one stream while the context is open, from a thread of its own."""

    def __init__(
        self, client: Client, *, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._patience_s = patience_s
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
        """Does not wait for a question that is under way; what it brings is said to nobody."""
        self._has_ended.set()

    def heard(self) -> None:
        """The stream has brought something."""
        self._has_text = True
        self._heard_at = self._clock()

    def _watch(self) -> None:
        said_at = self._heard_at - 1.0
        while not self._has_ended.wait(self._patience_s):
            heard_at = self._heard_at
            if said_at == heard_at or self._clock() - heard_at < self._patience_s:
                continue
            lost = self._lost_part()
            if lost and heard_at == self._heard_at and not self._has_ended.is_set():
                said_at = heard_at  # once for each silence
                # The text's line has no end yet where both are shown in one terminal.
                start = "\n" if self._has_text and sys.stderr.isatty() else ""
                print(f"{start}{lost} lost, waiting", file=sys.stderr, flush=True)

    def _lost_part(self) -> str:
        """The part that nothing can come without and that is not there; "" where none is lost or nobody can tell."""
        try:
            pools = self._client.info().pools
        except Unavailable as error:
            if error.reason == "COORDINATOR_UNAVAILABLE":
                return "coordinator"
            return "target" if is_without_target(error) else ""  # it was started a moment ago
        except SpecdecError:
            return ""
        return "" if any(pool.role == "target" and pool.replicas for pool in pools) else "target"
