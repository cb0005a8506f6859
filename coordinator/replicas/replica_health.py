"""Whether one replica keeps its deadlines: out of use from a missed one until it is heard of again.

A replica that answers others meanwhile is busy, not hung, and stays in use. Not here: the deadlines (`draft_clock`),
connections and whether the process lives (`pool`). A property of `pool.Replica`; told by `round/draft_calls`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: A replica that is not heard of is asked once more after this long, by one session; each time in vain doubles it.
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0

#: A replica that was slow rather than hung gets deadlines twice as long each time, until it keeps one.
MAX_SLACK = 64.0


class ReplicaHealth:
    """The record of one replica. All times are of one monotonic clock, the event loop's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.slack = 1.0
        """What a deadline is to be multiplied by."""
        self._clock = clock
        self._marked_at: float | None = None
        self._ask_again_at = 0.0
        self._pause_s = FIRST_PAUSE_S

    def is_out(self, heard_at: float) -> bool:
        """Whether the replica is not to be asked now.

        Args:
            heard_at: when it last answered anything on its stream, however late.
        """
        if self._marked_at is None:
            return False
        if heard_at > self._marked_at:
            self._marked_at = None
            self._be_patient()
            return False
        return self._clock() < self._ask_again_at

    @property
    def is_marked(self) -> bool:
        """Whether it missed a deadline and was not heard of since; what is asked of it now is a trial."""
        return self._marked_at is not None

    def note_asked(self) -> None:
        """A call is about to be sent. One trial is enough at a time."""
        if self.is_marked:
            self._ask_again_at = self._clock() + self._pause_s

    def note_late(self, asked_at: float, heard_at: float) -> bool:
        """A call sent at `asked_at` has missed its deadline; returns whether that marks the replica."""
        if heard_at > asked_at:
            self._be_patient()
            return False
        now = self._clock()
        if self._marked_at is None or asked_at > self._marked_at:  # else sent before the mark, and counted with it
            self._pause_s = FIRST_PAUSE_S if self._marked_at is None else min(2 * self._pause_s, MAX_PAUSE_S)
            self._marked_at = now
            self._ask_again_at = now + self._pause_s
        return True

    def note_stood_still(self) -> None:
        """None of its calls were answered for longer than any of them may take."""
        self.note_late(self._clock(), heard_at=float("-inf"))

    def reset(self) -> None:
        """It has answered in time, or its process answers again."""
        self.slack = 1.0
        self._marked_at = None
        self._pause_s = FIRST_PAUSE_S

    def _be_patient(self) -> None:
        self.slack = min(2 * self.slack, MAX_SLACK)
