"""Detect the loss of a rank by a connection between the first rank and each of the others.

A rank that ends closes its connections, and its peers notice within milliseconds, even while they wait for it in a
step. A rank that stops (SIGSTOP, a lost machine) sends no more heartbeats. A rank that fails sends its error first.
`specdec.service.rank` ends a rank that has lost its group. A device that hangs while its process lives is detected by
`engine.parallel.leader` and the group's own timeout.

    heartbeat: "\\n"      error: a JSON object and "\\n"      orderly end: "bye\\n"
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

from specdec.contract import errors
from specdec.contract.errors import SpecdecError, Unavailable

BEAT_S = 1.0
#: Number of consecutive heartbeats that a lost rank misses.
PATIENCE_BEATS = 8

#: Long, because the process that started the ranks notices if one of them ends instead of connecting.
_CONNECT_S = 600.0
_BYE = b"bye"
_READ_BYTES = 4096
_MOST_WORDS = 2000
#: Most ranks of a replica: all may connect at once.
_BACKLOG = 64

_log = logging.getLogger(__name__)


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at a host's name or address of either family; port 0 takes a free one."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


class Store(Protocol):
    """Key-value store through which ranks find each other (`torch.distributed.Store`)."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class RankHeartbeat:
    """One rank's connections. A loss is reported once, from a separate thread."""

    def __init__(self, peers: Mapping[int, socket.socket]) -> None:
        """`peers`: connections by rank, which this object owns from now on."""
        self._peers = peers
        self._guard = threading.Lock()
        self._lost: SpecdecError | None = None  # guarded
        self._note_lost: Callable[[SpecdecError], None] | None = None  # guarded
        self._is_closed = False
        for rank, peer in peers.items():
            threading.Thread(target=self._watch, args=(rank, peer), name=f"rank-{rank}", daemon=True).start()

    @classmethod
    def of_first(cls, store: Store, host: str, num_ranks: int) -> RankHeartbeat:
        """Wait for all other ranks to connect."""
        with listen(host) as server:
            server.settimeout(_CONNECT_S)
            store.set("lifeline", str(server.getsockname()[1]))
            peers: dict[int, socket.socket] = {}
            while len(peers) < num_ranks - 1:
                peer = server.accept()[0]
                peer.settimeout(BEAT_S)
                rank = _rank_of(peer)
                if rank in range(1, num_ranks) and rank not in peers:
                    peers[rank] = peer
                else:  # not a rank of this group
                    peer.close()
        return cls(peers)

    @classmethod
    def of_other(cls, store: Store, host: str, rank: int) -> RankHeartbeat:
        """Connect to the first rank."""
        peer = socket.create_connection((host, int(store.get("lifeline"))), _CONNECT_S)
        peer.sendall(b"%d\n" % rank)
        return cls({0: peer})

    def watch(self, note_lost: Callable[[SpecdecError], None]) -> None:
        """Set the function that is called with the reason once a rank is lost; call it now if one is lost already."""
        with self._guard:
            self._note_lost, lost = note_lost, self._lost
        if lost is not None:
            note_lost(lost)

    def fail(self, error: SpecdecError) -> None:
        """Tell the others why this rank is going to end."""
        words = {"error": type(error).__name__, "message": error.message[:_MOST_WORDS], "field": error.field}
        self._say(json.dumps(words).encode())

    def close(self) -> None:
        """Announce an orderly end, which the others do not report as a loss. Idempotent."""
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
        except OSError:  # data that was on its way to an ended process is refused
            last_line, reason = b"", "its process has ended"
        else:
            reason = "its process has ended"
        if last_line == _BYE or self._is_closed:
            return
        self._lose(_error_of(last_line) or Unavailable(f"rank {rank} is gone: {reason}"))

    def _read_until_end(self, peer: socket.socket) -> bytes:
        """Wait for a line other than a heartbeat, or for the peer to close; return the last such line, or b"".

        Raises:
            TimeoutError: the peer sends no heartbeats.
            OSError: the peer is gone.
        """
        held, num_missed, beat_at_s = b"", 0, 0.0
        while num_missed < PATIENCE_BEATS:
            if time.monotonic() >= beat_at_s:
                with contextlib.suppress(OSError):  # the peer may have ended and left an error to read
                    peer.sendall(b"\n")
                beat_at_s = time.monotonic() + BEAT_S
            peer.settimeout(max(0.01, beat_at_s - time.monotonic()))
            try:
                read = peer.recv(_READ_BYTES)
            except TimeoutError:
                # This counts waits, not time: while this whole process is stopped, the peer is not silent.
                num_missed += 1
                continue
            num_missed = 0
            *lines, held = (held + read).split(b"\n")
            spoken = [line for line in lines if line]
            if spoken or not read:
                return spoken[-1] if spoken else b""
        raise TimeoutError(f"it has sent no heartbeat for {PATIENCE_BEATS * BEAT_S:.0f} s")

    def _lose(self, error: SpecdecError) -> None:
        with self._guard:
            if self._lost is not None:
                return
            self._lost, note_lost = error, self._note_lost
        _log.error("%s", error.message)
        if note_lost is not None:
            note_lost(error)


def _rank_of(peer: socket.socket) -> int:
    """Return the rank that a new connection sends; 0 if it sends something else."""
    try:
        return int(peer.recv(_READ_BYTES))
    except (OSError, ValueError):
        return 0


def _error_of(words: bytes) -> SpecdecError | None:
    """Return the error that a rank sent last; None if the line is not an error."""
    try:
        said = json.loads(words)
        kind = getattr(errors, said["error"])
        return kind(said["message"], field=said["field"]) if issubclass(kind, SpecdecError) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
