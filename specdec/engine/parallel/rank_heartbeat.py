"""Ranks live and die together: a connection of the first rank to each of the others says whether they are still there.

A rank that ends closes its connections, and its peers know within milliseconds, whatever they wait for; one that stands
still (SIGSTOP, a machine that is gone) falls silent. A rank that fails says why before it goes. Not here: what becomes
of a rank that has lost its group (`specdec.service.rank`), and a device that hangs while its process lives (`lead`, and
the group's own timeout).

    beat: "\\n"      last words: a JSON object and "\\n"      leaving in order: "bye\\n"
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from specdec import errors
from specdec.errors import SpecdecError, Unavailable

BEAT_S = 1.0
#: So many beats in a row must be missed.
PATIENCE_BEATS = 8

#: Who started the ranks sees when one of them ends instead of coming.
_CONNECT_S = 600.0
_BYE = b"bye"
_READ_BYTES = 4096
_MOST_WORDS = 2000

_log = logging.getLogger(__name__)


class Store(Protocol):
    """Where ranks find each other (`torch.distributed.Store`)."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class RankHeartbeat:
    """One rank's connections. What is lost is told once, from a thread of its own."""

    def __init__(self, peers: Mapping[int, socket.socket]) -> None:
        """peers: by rank; owned from now on."""
        self._peers = peers
        self._guard = threading.Lock()
        self._lost: SpecdecError | None = None  # guarded
        self._note_lost: Callable[[SpecdecError], None] | None = None  # guarded
        self._is_closed = False
        for rank, peer in peers.items():
            threading.Thread(target=self._watch, args=(rank, peer), name=f"rank-{rank}", daemon=True).start()

    @classmethod
    def of_first(cls, store: Store, host: str, num_ranks: int) -> RankHeartbeat:
        """Waits for all others to connect."""
        with socket.create_server((host, 0)) as server:
            server.settimeout(_CONNECT_S)
            store.set("lifeline", str(server.getsockname()[1]))
            peers: dict[int, socket.socket] = {}
            while len(peers) < num_ranks - 1:
                peer = server.accept()[0]
                peer.settimeout(BEAT_S)
                rank = _rank_of(peer)
                if rank in range(1, num_ranks) and rank not in peers:
                    peers[rank] = peer
                else:  # not one of ours
                    peer.close()
        return cls(peers)

    @classmethod
    def of_other(cls, store: Store, host: str, rank: int) -> RankHeartbeat:
        """Connects to the first rank."""
        peer = socket.create_connection((host, int(store.get("lifeline"))), _CONNECT_S)
        peer.sendall(b"%d\n" % rank)
        return cls({0: peer})

    def watch(self, note_lost: Callable[[SpecdecError], None]) -> None:
        """Names who is told that a rank is gone, and why; at once where it is gone already."""
        with self._guard:
            self._note_lost, lost = note_lost, self._lost
        if lost is not None:
            note_lost(lost)

    def fail(self, error: SpecdecError) -> None:
        """Tells the others why this rank is going to end."""
        words = {"error": type(error).__name__, "message": error.message[:_MOST_WORDS], "field": error.field}
        self._say(json.dumps(words).encode())

    def close(self) -> None:
        """Leaves in order: the others lose nothing. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._say(_BYE)

    def _say(self, words: bytes) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.sendall(words + b"\n")

    def _watch(self, rank: int, peer: socket.socket) -> None:
        try:
            last_line = self._read_until_end(peer)
        except TimeoutError as silence:
            last_line, reason = b"", str(silence)
        except OSError:  # what was on its way to a process that has ended is refused
            last_line, reason = b"", "it has ended"
        else:
            reason = "it has ended"
        if last_line == _BYE or self._is_closed:
            return
        self._lose(_error_of(last_line) or Unavailable(f"rank {rank} is gone: {reason}"))

    def _read_until_end(self, peer: socket.socket) -> bytes:
        """Returns the last line that is no beat, once there is one or the peer has closed.

        Raises:
            TimeoutError: the peer is silent.
            OSError: it is gone.
        """
        held, num_missed, beat_at_s = b"", 0, 0.0
        while num_missed < PATIENCE_BEATS:
            if time.monotonic() >= beat_at_s:
                with contextlib.suppress(OSError):  # it may have gone with words that are still to be read
                    peer.sendall(b"\n")
                beat_at_s = time.monotonic() + BEAT_S
            peer.settimeout(max(0.01, beat_at_s - time.monotonic()))
            try:
                read = peer.recv(_READ_BYTES)
            except TimeoutError:
                # Counted by own waits: time in which this whole process stood still is nobody's silence.
                num_missed += 1
                continue
            num_missed = 0
            *lines, held = (held + read).split(b"\n")
            spoken = [line for line in lines if line]
            if spoken or not read:
                return spoken[-1] if spoken else b""
        raise TimeoutError(f"it has been silent for {PATIENCE_BEATS * BEAT_S:.0f} s")

    def _lose(self, error: SpecdecError) -> None:
        with self._guard:
            if self._lost is not None:
                return
            self._lost, note_lost = error, self._note_lost
        _log.error("%s", error.message)
        if note_lost is not None:
            note_lost(error)


def _rank_of(peer: socket.socket) -> int:
    """What a new connection says that it is; 0 where that makes no sense."""
    try:
        return int(peer.recv(_READ_BYTES))
    except (OSError, ValueError):
        return 0


def _error_of(words: bytes) -> SpecdecError | None:
    """What a rank said last; None where it said nothing that makes sense."""
    try:
        said = json.loads(words)
        kind = getattr(errors, said["error"])
        return kind(said["message"], field=said["field"]) if issubclass(kind, SpecdecError) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
