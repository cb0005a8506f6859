"""Sessions that may come back while a step runs."""

from __future__ import annotations

from specdec.engine.schedule.awaited_sessions import MAX_AWAITED_S, AwaitedSessions


def test_a_session_is_away_from_its_answer_to_its_next_call() -> None:
    awaited = AwaitedSessions()
    awaited.note_answered("a", 1.0)
    awaited.note_answered("b", 1.0)
    assert awaited.count(1.1) == 2
    awaited.note_back("a")
    assert awaited.count(1.1) == 1
    awaited.note_back("never seen")
    assert awaited.count(1.1) == 1


def test_whoever_stays_away_is_not_expected_for_ever() -> None:
    awaited = AwaitedSessions()
    awaited.note_answered("a", 0.0)
    awaited.note_answered("b", 0.5)
    awaited.note_answered("a", 0.9)
    assert awaited.count(0.5 + MAX_AWAITED_S) == 1
    assert awaited.count(0.9 + MAX_AWAITED_S) == 0
