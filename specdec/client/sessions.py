"""Number of tokens that this client knows each of its sessions to hold.

A client sends the number with the next turn and the server compares it with its own, so that a lost session is
reported instead of continued from nothing. Both clients and `transcript` use it, from any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from specdec.v1 import coordinator_pb2 as pb

#: Number of sessions remembered. The next turn of a forgotten one is sent without a number.
_MAX_SESSIONS = 65536


@dataclass(slots=True)
class _Turn:
    """The latest turn of a session that this client began."""

    request_id: str
    num_tokens: int | None = None
    """Number of tokens in the session after the turn; None until the turn has ended."""


class SessionSizes:
    """Token counts by session id."""

    def __init__(self, *, remembers: bool = True) -> None:
        """Make an empty record. `remembers` is False for a client whose sessions other clients continue, too."""
        self.remembers = remembers
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self._lock = threading.Lock()

    def add_expected_tokens(self, request: pb.GenerateRequest) -> pb.GenerateRequest:
        """Set the request's expected session tokens if they are known and the caller set none; return the request."""
        with self._lock:
            turn = self._turns.get(request.session_id)
        if turn is not None and turn.num_tokens is not None and not request.HasField("expected_session_tokens"):
            request.expected_session_tokens = turn.num_tokens
        return request

    def begin(self, session_id: str, request_id: str) -> None:
        """Note that a turn has begun. Its size stays unknown until `learn`, because its stream may be closed early."""
        if not self.remembers:
            return
        with self._lock:
            self._turns[session_id] = _Turn(request_id)
            self._turns.move_to_end(session_id)
            if len(self._turns) > _MAX_SESSIONS:
                self._turns.popitem(last=False)

    def learn(self, session_id: str, request_id: str, num_tokens: int) -> None:
        """Note how many tokens the session holds after a turn.

        The number is dropped if a later turn has begun here or the session has been deleted since.
        """
        with self._lock:
            turn = self._turns.get(session_id)
            if turn is not None and turn.request_id == request_id:
                turn.num_tokens = num_tokens

    def forget(self, session_id: str) -> None:
        """Forget a deleted session."""
        with self._lock:
            self._turns.pop(session_id, None)
