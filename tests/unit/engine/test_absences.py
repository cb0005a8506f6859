"""Sessions that may come back while a step runs."""

from __future__ import annotations

from specdec.engine.schedule.absences import MAX_ABSENCE_S, Absences


def test_a_session_is_away_from_its_answer_to_its_next_call() -> None:
    absences = Absences()
    absences.note_answered("a", 1.0)
    absences.note_answered("b", 1.0)
    assert absences.count(1.1) == 2
    absences.note_back("a")
    assert absences.count(1.1) == 1
    absences.note_back("never seen")
    assert absences.count(1.1) == 1


def test_whoever_stays_away_is_not_expected_for_ever() -> None:
    absences = Absences()
    absences.note_answered("a", 0.0)
    absences.note_answered("b", 0.5)
    absences.note_answered("a", 0.9)
    assert absences.count(0.5 + MAX_ABSENCE_S) == 1
    assert absences.count(0.9 + MAX_ABSENCE_S) == 0
