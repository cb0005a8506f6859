"""Bounds the readers of each session's request, whether they read a running generation or replay a finished one.

A client that lost its connection resumes its request before the coordinator knows that the old reader is gone. So the
newest reader stays, and the oldest one is cut off. `generation_service` passes every reader through here.
"""

from __future__ import annotations

from coordinator.generation.request_log import LoggedRequest
from coordinator.generation.stream import OutputStream, Subscription
from coordinator.requests import Finished
from specdec.errors import ResourceExhausted
from specdec.tenant import SessionKey

#: Limit of readers of one session at a coordinator. Each holds a place in the output, and perhaps a copy of it.
MAX_READERS = 16


class SessionReaders:
    """The open readers of a coordinator's sessions. Used from one event loop."""

    def __init__(self) -> None:
        self._readers: dict[SessionKey, dict[Subscription, None]] = {}
        """Readers by session, the oldest first; no session without one."""

    def add(self, key: SessionKey, reader: Subscription) -> Subscription:
        """Count a reader until it is closed, and return it. Beyond the limit, the oldest reader is cut off."""
        readers = self._readers.setdefault(key, {})
        readers[reader] = None
        reader.when_closed = lambda: self._remove(key, reader)
        if len(readers) > MAX_READERS:
            oldest = next(iter(readers))
            del readers[oldest]
            oldest.cut(_displaced())
        return reader

    def _remove(self, key: SessionKey, reader: Subscription) -> None:
        readers = self._readers.get(key, {})
        readers.pop(reader, None)
        if not readers:
            self._readers.pop(key, None)


def replay(logged: LoggedRequest, num_held: int) -> Subscription:
    """Return a reader of a finished request, which is read from the log. It already holds `num_held` output tokens."""
    stream = OutputStream(logged.identity)
    stream.publish(logged.output)
    if logged.finish_reason is not None:
        stream.finish(Finished(logged.finish_reason, logged.identity.output_start, stream.num_tokens, logged.stats))
    return Subscription(stream, num_held, on_close=lambda _: None)


def _displaced() -> ResourceExhausted:
    error = ResourceExhausted(
        f"more than {MAX_READERS} clients read this request at once; its newest readers go on, and this one is cut off"
    )
    error.retry_after_s = None  # a resumption at once would cut off another reader
    return error
