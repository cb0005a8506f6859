"""Times at which a client of several coordinators looks for those that report SERVING. `coordinators` does it."""

from __future__ import annotations

import time

#: Pauses between two looks while none reports SERVING.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class Looks:
    """Looks before calls: one before the first call, and further ones while no coordinator is known to serve."""

    def __init__(self, *, are_needed: bool) -> None:
        """`are_needed`: whether the endpoint may name several coordinators; otherwise no look is ever due."""
        self._are_needed = are_needed
        self._due_s = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def is_due(self) -> bool:
        """Return whether a look is due before the next call."""
        return self._are_needed and time.monotonic() >= self._due_s

    def ask(self) -> None:
        """Make a look due now."""
        self._due_s = 0.0

    def note(self, *, is_serving: bool) -> None:
        """Note the result of a look. The pauses between looks that find nothing double."""
        if is_serving:
            self._pause_s, self._due_s = _FIRST_PAUSE_S, float("inf")
        else:
            self._due_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
