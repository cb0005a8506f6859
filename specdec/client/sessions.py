"""How many tokens this client believes each of its sessions holds, so that none that was lost goes on unseen.

Not here: what a session really holds; the server compares. Called by both clients and by `transcript`; safe to use from
several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from specdec.v1 import coordinator_pb2 as pb

#: Sessions remembered; of an older one the server is told nothing.
_MAX_SESSIONS = 65536


class SessionSizes:
    """By session id; what is not known is left out of requests."""

    def __init__(self) -> None:
        self._num_tokens: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def state(self, request: pb.GenerateRequest) -> pb.GenerateRequest:
        """Says in a new turn's request what its session should hold, unless the caller said so; returns the request."""
        with self._lock:
            num_tokens = self._num_tokens.get(request.session_id)
        if num_tokens is not None and not request.HasField("expected_session_tokens"):
            request.expected_session_tokens = num_tokens
        return request

    def learn(self, session_id: str, num_tokens: int) -> None:
        """An answer has ended, and said how many tokens the session holds."""
        with self._lock:
            self._num_tokens[session_id] = num_tokens
            self._num_tokens.move_to_end(session_id)
            if len(self._num_tokens) > _MAX_SESSIONS:
                self._num_tokens.popitem(last=False)

    def forget(self, session_id: str) -> None:
        """A turn has begun, and may be left before its end; or the session is deleted."""
        with self._lock:
            self._num_tokens.pop(session_id, None)
