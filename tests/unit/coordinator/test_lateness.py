"""A hung replica is left alone until it is heard of; a busy one is not taken for hung; a slow one gets more time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from coordinator.replicas.replica_health import FIRST_PAUSE_S, MAX_PAUSE_S, MAX_SLACK, Lateness


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lateness(clock: Clock) -> Lateness:
    return Lateness(clock)


def miss(lateness: Lateness, clock: Clock, *, heard_at: float = 0.0) -> bool:
    """One call that misses its deadline."""
    lateness.note_asked()
    asked_at = clock.now
    clock.now += 0.1
    return lateness.note_late(asked_at, heard_at)


def test_a_replica_that_never_was_late_is_in_use(lateness: Lateness) -> None:
    assert not lateness.is_out(heard_at=0.0)


def test_one_missed_deadline_without_a_sign_of_life_puts_a_replica_out(lateness: Lateness, clock: Clock) -> None:
    assert miss(lateness, clock)
    assert lateness.is_out(heard_at=0.0)


def test_a_replica_that_answered_others_meanwhile_is_busy_and_stays_in_use(lateness: Lateness, clock: Clock) -> None:
    assert not miss(lateness, clock, heard_at=clock.now + 0.05)
    assert not lateness.is_out(heard_at=clock.now)
    assert lateness.slack == 2.0


def test_its_first_late_answer_brings_it_back_with_more_time(lateness: Lateness, clock: Clock) -> None:
    miss(lateness, clock)
    clock.now += 0.2
    assert not lateness.is_out(heard_at=clock.now)
    assert lateness.slack == 2.0
    lateness.forgive()
    assert lateness.slack == 1.0


def test_a_slow_replica_gets_twice_the_time_each_time_up_to_a_limit(lateness: Lateness, clock: Clock) -> None:
    for _ in range(20):
        miss(lateness, clock)
        clock.now += 0.2
        assert not lateness.is_out(heard_at=clock.now)
    assert lateness.slack == MAX_SLACK


def test_a_replica_never_heard_of_is_tried_less_and_less_often_and_never_gets_more_time(
    lateness: Lateness, clock: Clock
) -> None:
    pauses = []
    for _ in range(10):
        miss(lateness, clock)
        began = clock.now
        while lateness.is_out(heard_at=0.0):
            clock.now += 0.25
        pauses.append(clock.now - began)
    assert pauses == [min(FIRST_PAUSE_S * 2**index, MAX_PAUSE_S) for index in range(10)]
    assert lateness.slack == 1.0


def test_only_one_session_tries_a_replica_again(lateness: Lateness, clock: Clock) -> None:
    miss(lateness, clock)
    clock.now += FIRST_PAUSE_S
    assert not lateness.is_out(heard_at=0.0)
    assert lateness.is_marked
    lateness.note_asked()
    assert lateness.is_out(heard_at=0.0)
    assert not lateness.is_out(heard_at=clock.now)
    assert not lateness.is_marked


def test_many_sessions_that_wait_for_one_hung_replica_count_as_one_lateness(lateness: Lateness, clock: Clock) -> None:
    asked_at = clock.now
    clock.now += 0.1
    for _ in range(50):
        assert lateness.note_late(asked_at, heard_at=0.0)
    clock.now += FIRST_PAUSE_S
    assert not lateness.is_out(heard_at=0.0)


def test_a_replica_that_kept_a_deadline_begins_afresh(lateness: Lateness, clock: Clock) -> None:
    for _ in range(4):
        miss(lateness, clock)
        clock.now += MAX_PAUSE_S
    lateness.forgive()
    assert not lateness.is_out(heard_at=0.0)
    miss(lateness, clock)
    clock.now += FIRST_PAUSE_S
    assert not lateness.is_out(heard_at=0.0)


def test_what_was_heard_when_a_call_was_sent_is_no_answer_to_it(lateness: Lateness, clock: Clock) -> None:
    assert miss(lateness, clock, heard_at=clock.now)


def test_what_was_heard_when_the_replica_was_given_up_does_not_bring_it_back(lateness: Lateness, clock: Clock) -> None:
    miss(lateness, clock)
    assert lateness.is_out(heard_at=clock.now)


def test_a_call_sent_when_the_replica_was_given_up_counts_with_the_one_that_gave_it_up(
    lateness: Lateness, clock: Clock
) -> None:
    miss(lateness, clock)
    asked_at = clock.now
    clock.now += FIRST_PAUSE_S
    assert lateness.note_late(asked_at, heard_at=0.0)
    assert not lateness.is_out(heard_at=0.0)  # the pause is the first one's
