"""Count the rounds that a replica answers, and those of other sessions between two answers of one session.

The replica counts, because several coordinators may share it and each sees only its own calls. Coordinators choose
gamma by the counts (docs/protocol.md section 7). Use from one thread alone.
"""

from __future__ import annotations

from typing import NamedTuple

from specdec.engine.sessions.sequence import Sequence


class OtherAnswers(NamedTuple):
    """Answers that a replica gave to other sessions."""

    num_rounds: int = 0
    num_rows: int = 0
    """Number of positions in those answers."""


class ConcurrentRounds:
    """Counter of the answers of one replica."""

    def __init__(self) -> None:
        self._num_rounds = 0
        self._num_rows = 0

    def note(self, sequence: Sequence, num_rows: int, num_other_runs: int = 0) -> OtherAnswers:
        """Count an answer.

        Args:
            sequence: sequence of the answered session.
            num_rows: number of positions in the answer.
            num_other_runs: runs of other sessions in the same step; each counts as one answer, however long it lasts.

        Returns:
            Answers to other sessions since this session's previous answer; zeros for its first answer.
        """
        self._num_rounds += 1
        self._num_rows += num_rows
        before, sequence.answered_at = sequence.answered_at, (self._num_rounds, self._num_rows)
        if before is None:
            return OtherAnswers()
        num_rounds, num_other_rows = self._num_rounds - before[0] - 1, self._num_rows - before[1] - num_rows
        return OtherAnswers(num_rounds + num_other_runs, num_other_rows + num_other_runs)

    def pass_over(self, sequence: Sequence) -> None:
        """Note a step of a run, which is not counted: what others were answered before it is over for its session."""
        sequence.answered_at = (self._num_rounds, self._num_rows)
