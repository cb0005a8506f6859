"""How long to wait before something that has ended is started again: hardly at first, then ever longer.

Not here: who starts what (`specdec.supervision.supervisor`, `specdec.service.rank_group`).
"""

from __future__ import annotations

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
#: After so long in one piece, what was before is forgotten.
_HEALTHY_S = 60.0


class RestartPauses:
    """The pauses of one thing that is kept running."""

    def __init__(self) -> None:
        self._pause_s = _FIRST_PAUSE_S

    def next_s(self, *, lived_s: float) -> float:
        """The pause before the next start, in seconds.

        Args:
            lived_s: from its last start to its end.
        """
        if lived_s >= _HEALTHY_S:
            self._pause_s = _FIRST_PAUSE_S
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return pause_s
