"""How many tokens this client believes each of its sessions holds, so that none that was lost goes on unseen.

Not here: what a session really holds; the server compares. Called by both clients and by `transcript`; safe to use from
several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from specdec.v1 import coordinator_pb2 as pb

#: Sessions remembered; of an older one the server is told nothing.
_MAX_SESSIONS = 65536


@dataclass(slots=True)
class _Turn:
    """The last one of a session that began here."""

    request_id: str
    num_tokens: int | None = None
    """What its end said that the session holds."""


class SessionSizes:
    """By session id; what is not known is left out of requests."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self._lock = threading.Lock()

    def state(self, request: pb.GenerateRequest) -> pb.GenerateRequest:
        """Says in a new turn's request what its session should hold, unless the caller said so; returns the request."""
        with self._lock:
            turn = self._turns.get(request.session_id)
        if turn is not None and turn.num_tokens is not None and not request.HasField("expected_session_tokens"):
            request.expected_session_tokens = turn.num_tokens
        return request

    def begin(self, session_id: str, request_id: str) -> None:
        """A turn has begun, and may be left before its end."""
        with self._lock:
            self._turns[session_id] = _Turn(request_id)
            self._turns.move_to_end(session_id)
            if len(self._turns) > _MAX_SESSIONS:
                self._turns.popitem(last=False)

    def learn(self, session_id: str, request_id: str, num_tokens: int) -> None:
        """An answer has ended, and said how many tokens the session holds; of a turn that is not the last one here, or
        of a session that has been deleted since, nothing is learnt."""
        with self._lock:
            turn = self._turns.get(session_id)
            if turn is not None and turn.request_id == request_id:
                turn.num_tokens = num_tokens

    def forget(self, session_id: str) -> None:
        """The session is deleted."""
        with self._lock:
            self._turns.pop(session_id, None)
