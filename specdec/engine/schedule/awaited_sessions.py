"""Count the sessions that were answered and will probably call again while the next step runs.

The scheduler limits prefill for them, because a session that calls during a step waits for its end. Called by the
engine loop and by the simulated device, each on one thread, with the caller's clock.
"""

from __future__ import annotations

#: A session that has not called again after this time is not awaited: its text is complete, or its user is reading.
MAX_AWAITED_S = 1.0


class AwaitedSessions:
    """The time of the last answer of each session."""

    def __init__(self) -> None:
        self._answered_s: dict[str, float] = {}  # in order of time

    def note_answered(self, session_id: str, now_s: float) -> None:
        """Note that the session was answered and will usually call again."""
        self._answered_s.pop(session_id, None)
        self._answered_s[session_id] = now_s

    def note_back(self, session_id: str) -> None:
        """Note that the session called again or was released."""
        self._answered_s.pop(session_id, None)

    def count(self, now_s: float) -> int:
        """Return the number of sessions that are expected to call again."""
        while self._answered_s:
            session_id, answered_s = next(iter(self._answered_s.items()))
            if answered_s + MAX_AWAITED_S > now_s:
                break
            del self._answered_s[session_id]
        return len(self._answered_s)
