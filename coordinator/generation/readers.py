"""Bounds the readers of each session's request, whether they read a running generation or replay a finished one.

A client that lost its connection resumes its request before the coordinator knows that the old reader is gone. So the
newest reader stays, and the oldest one is cut off. All replays of a request at once read the same copy of its output.
`generation_service` passes every reader through here.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

from coordinator.generation.request_log import LoggedRequest, check_held
from coordinator.generation.stream import OutputStream, Subscription, end_of
from specdec.contract.errors import ResourceExhausted
from specdec.contract.tenant import SessionKey
from specdec.state.store import RequestRecord

#: Limit of readers of one session at a coordinator. Each holds a place in the output, and perhaps a copy of it.
MAX_READERS = 16


class SessionReaders:
    """The open readers of a coordinator's sessions. Used from one event loop."""

    def __init__(self, note_readers: Callable[[str, int], None]) -> None:
        """`note_readers` takes a tenant and the number of its readers that came, or whose calls ended if negative."""
        self._note_readers = note_readers
        self._replayed: WeakValueDictionary[SessionKey, OutputStream] = WeakValueDictionary()
        """Outputs that are replayed now."""
        self._readers: dict[SessionKey, dict[Subscription, None]] = {}
        """Readers by session, the oldest first; no session without one."""

    def add(self, key: SessionKey, reader: Subscription, limit: int = MAX_READERS) -> Subscription:
        """Count a reader until it is closed, and return it. Beyond the limit, the oldest readers are cut off."""
        readers = self._readers.setdefault(key, {})
        readers[reader] = None
        self._note_readers(key.tenant, +1)
        reader.when_closed = lambda: self._remove(key, reader)
        reader.when_gone = lambda: self._note_readers(key.tenant, -1)
        while len(readers) > max(1, limit):
            oldest = next(iter(readers))
            del readers[oldest]
            oldest.cut(_displaced(limit))
        return reader

    def num_of(self, key: SessionKey) -> int:
        """Return the number of open readers of a session."""
        return len(self._readers.get(key, {}))

    def replay(self, key: SessionKey, logged: LoggedRequest, num_held: int) -> Subscription:
        """Return a reader of a finished request, as the log has it. It already holds `num_held` output tokens."""
        stream = self._replayed[key] = _replayed(logged)
        return _reader(stream, num_held)

    def replay_again(self, key: SessionKey, stored: RequestRecord, num_held: int) -> Subscription | None:
        """Return a reader of a finished request that others replay now; None if none does."""
        stream = self._replayed.get(key)
        if stream is None or (stream.identity.request_id, stream.identity.turn) != (stored.request_id, stored.turn):
            return None
        check_held(num_held, stream.num_tokens, has_finished=True)
        return _reader(stream, num_held)

    def _remove(self, key: SessionKey, reader: Subscription) -> None:
        readers = self._readers.get(key, {})
        readers.pop(reader, None)
        if not readers:
            self._readers.pop(key, None)


def _replayed(logged: LoggedRequest) -> OutputStream:
    stream = OutputStream(logged.identity)
    stream.publish(logged.output)
    if logged.finish_reason is not None:
        stream.finish(end_of(stream, logged.finish_reason, logged.writer, logged.stats))
    return stream


def _reader(stream: OutputStream, num_held: int) -> Subscription:
    return Subscription(stream, num_held, on_close=lambda _: None)


def _displaced(limit: int) -> ResourceExhausted:
    error = ResourceExhausted(
        f"more than {limit} clients read this request at once; its newest readers go on, and this one is cut off"
    )
    error.retry_after_s = None  # a resumption at once would cut off another reader
    return error
