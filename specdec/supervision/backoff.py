"""Pauses between restarts of a process that keeps ending: one second at first, doubled up to half a minute."""

from __future__ import annotations

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
#: A process that ran for this long starts again with the first pause.
_HEALTHY_S = 60.0


class RestartPauses:
    """The pauses of one supervised process."""

    def __init__(self) -> None:
        self._pause_s = _FIRST_PAUSE_S

    def next_s(self, *, lived_s: float) -> float:
        """Return the pause before the next start, in seconds.

        Args:
            lived_s: time from the last start to its end.
        """
        if lived_s >= _HEALTHY_S:
            self._pause_s = _FIRST_PAUSE_S
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return pause_s
