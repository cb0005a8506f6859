"""How many rounds a replica has answered, and how many for others between two answers of one session.

Counted here and not by those who ask, because several coordinators may share a replica and each sees its own calls
alone. Not here: what is made of it (a coordinator's gamma, docs/protocol.md section 7). Told by whoever makes the
answers, from one thread alone.
"""

from __future__ import annotations

from typing import NamedTuple

from specdec.engine.sessions.sequence import Sequence


class OtherAnswers(NamedTuple):
    """What a replica answered for others."""

    num_rounds: int = 0
    num_rows: int = 0
    """Positions in them."""


class ConcurrentRounds:
    """Counts the answers of one replica."""

    def __init__(self) -> None:
        self._num_rounds = 0
        self._num_rows = 0

    def note(self, sequence: Sequence, num_rows: int) -> OtherAnswers:
        """Counts an answer.

        Args:
            sequence: of the session that gets it.
            num_rows: positions in it.

        Returns:
            What was answered for others since the session's answer before; nothing where this is its first.
        """
        self._num_rounds += 1
        self._num_rows += num_rows
        before, sequence.answered_at = sequence.answered_at, (self._num_rounds, self._num_rows)
        if before is None:
            return OtherAnswers()
        return OtherAnswers(self._num_rounds - before[0] - 1, self._num_rows - before[1] - num_rows)
