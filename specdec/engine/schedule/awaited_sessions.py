"""Sessions that were answered and will call again: while a step runs, perhaps, and then they wait for its end.

Not here: a clock (the caller's), what is done about it (`scheduler`). Called by the engine loop and by the simulated
device, each on one thread.
"""

from __future__ import annotations

#: A session that has not come back after this long is not waited for: its text is complete, or its user is reading.
MAX_AWAITED_S = 1.0


class AwaitedSessions:
    """Remembers when each session was answered last."""

    def __init__(self) -> None:
        self._answered_s: dict[str, float] = {}  # in order of time

    def note_answered(self, session_id: str, now_s: float) -> None:
        """The session was answered and will usually call again."""
        self._answered_s.pop(session_id, None)
        self._answered_s[session_id] = now_s

    def note_back(self, session_id: str) -> None:
        """The session called, or is gone for good."""
        self._answered_s.pop(session_id, None)

    def count(self, now_s: float) -> int:
        """Sessions that are expected back."""
        while self._answered_s:
            session_id, answered_s = next(iter(self._answered_s.items()))
            if answered_s + MAX_AWAITED_S > now_s:
                break
            del self._answered_s[session_id]
        return len(self._answered_s)
