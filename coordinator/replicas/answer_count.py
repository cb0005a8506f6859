"""How many rounds one replica has answered this coordinator, and how many for others between two of one session.

Not here: what is made of it (`round/gamma`). A property of `pool.Replica`; told by `round/target_calls`.
"""

from __future__ import annotations

from typing import NamedTuple


class OtherAnswers(NamedTuple):
    """What a replica answered for others."""

    num_rounds: int
    num_rows: int
    """Positions in them."""


class AnswerMark(NamedTuple):
    """One answer's place among all answers of its replica."""

    counted_by: AnswerCount
    num_rounds: int
    """Answered by then, this one included."""
    num_rows: int


class AnswerCount:
    """Counts the answers of one replica."""

    def __init__(self) -> None:
        self._num_rounds = 0
        self._num_rows = 0

    def note(self, num_rows: int, *, since: AnswerMark | None) -> tuple[AnswerMark, OtherAnswers]:
        """Counts an answer.

        Args:
            num_rows: positions in it.
            since: the asker's answer before, whichever replica gave it.

        Returns:
            The mark of this answer, and what the replica answered for others since that one; nothing where another
            replica gave that one, or none did.
        """
        self._num_rounds += 1
        self._num_rows += num_rows
        mark = AnswerMark(self, self._num_rounds, self._num_rows)
        if since is None or since.counted_by is not self:
            return mark, OtherAnswers(0, 0)
        num_own_rows = since.num_rows + num_rows
        return mark, OtherAnswers(self._num_rounds - since.num_rounds - 1, self._num_rows - num_own_rows)
