"""A hung replica is out of use until it answers; a busy one stays in use; a slow one gets longer deadlines."""

from __future__ import annotations

import pytest

from coordinator.replicas.replica import FIRST_PAUSE_S, MAX_PAUSE_S, MAX_SLACK, ReplicaHealth
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def replica_health(clock: Clock) -> ReplicaHealth:
    return ReplicaHealth(clock)


def miss(replica_health: ReplicaHealth, clock: Clock, *, heard_at: float = 0.0) -> bool:
    """Make one call that misses its deadline."""
    replica_health.note_called()
    asked_at = clock.now_s
    clock.now_s += 0.1
    return replica_health.note_late(asked_at, heard_at)


def test_a_replica_that_was_never_late_is_in_use(replica_health: ReplicaHealth) -> None:
    assert not replica_health.is_out(heard_at=0.0)


def test_one_missed_deadline_without_any_answer_takes_a_replica_out_of_use(
    replica_health: ReplicaHealth, clock: Clock
) -> None:
    assert miss(replica_health, clock)
    assert replica_health.is_out(heard_at=0.0)


def test_a_late_replica_that_answered_other_calls_stays_in_use(replica_health: ReplicaHealth, clock: Clock) -> None:
    assert not miss(replica_health, clock, heard_at=clock.now_s + 0.05)
    assert not replica_health.is_out(heard_at=clock.now_s)
    assert replica_health.slack == 2.0


def test_its_first_late_answer_brings_it_back_with_more_time(replica_health: ReplicaHealth, clock: Clock) -> None:
    miss(replica_health, clock)
    clock.now_s += 0.2
    assert not replica_health.is_out(heard_at=clock.now_s)
    assert replica_health.slack == 2.0
    replica_health.reset()
    assert replica_health.slack == 1.0


def test_each_late_answer_doubles_a_replicas_deadlines_up_to_a_limit(
    replica_health: ReplicaHealth, clock: Clock
) -> None:
    for _ in range(20):
        miss(replica_health, clock)
        clock.now_s += 0.2
        assert not replica_health.is_out(heard_at=clock.now_s)
    assert replica_health.slack == MAX_SLACK


def test_a_silent_replica_is_tried_less_and_less_often_without_longer_deadlines(
    replica_health: ReplicaHealth, clock: Clock
) -> None:
    pauses = []
    for _ in range(10):
        miss(replica_health, clock)
        began = clock.now_s
        while replica_health.is_out(heard_at=0.0):
            clock.now_s += 0.25
        pauses.append(clock.now_s - began)
    assert pauses == pytest.approx([min(FIRST_PAUSE_S * 2**index, MAX_PAUSE_S) for index in range(10)])
    assert replica_health.slack == 1.0


def test_only_one_session_tries_a_replica_again(replica_health: ReplicaHealth, clock: Clock) -> None:
    miss(replica_health, clock)
    clock.now_s += FIRST_PAUSE_S
    assert not replica_health.is_out(heard_at=0.0)
    assert replica_health.is_marked
    replica_health.note_called()
    assert replica_health.is_out(heard_at=0.0)
    assert not replica_health.is_out(heard_at=clock.now_s)
    assert not replica_health.is_marked


def test_the_missed_deadlines_of_many_sessions_at_one_hung_replica_count_once(
    replica_health: ReplicaHealth, clock: Clock
) -> None:
    asked_at = clock.now_s
    clock.now_s += 0.1
    for _ in range(50):
        assert replica_health.note_late(asked_at, heard_at=0.0)
    clock.now_s += FIRST_PAUSE_S
    assert not replica_health.is_out(heard_at=0.0)


def test_a_replica_that_met_a_deadline_is_reset(replica_health: ReplicaHealth, clock: Clock) -> None:
    for _ in range(4):
        miss(replica_health, clock)
        clock.now_s += MAX_PAUSE_S
    replica_health.reset()
    assert not replica_health.is_out(heard_at=0.0)
    miss(replica_health, clock)
    clock.now_s += FIRST_PAUSE_S
    assert not replica_health.is_out(heard_at=0.0)


def test_an_answer_that_came_before_a_call_was_sent_does_not_count_for_it(
    replica_health: ReplicaHealth, clock: Clock
) -> None:
    assert miss(replica_health, clock, heard_at=clock.now_s)


def test_an_answer_that_came_before_the_replica_was_marked_does_not_bring_it_back(
    replica_health: ReplicaHealth, clock: Clock
) -> None:
    miss(replica_health, clock)
    assert replica_health.is_out(heard_at=clock.now_s)


def test_a_call_sent_before_the_replica_was_marked_does_not_mark_it_again(
    replica_health: ReplicaHealth, clock: Clock
) -> None:
    miss(replica_health, clock)
    asked_at = clock.now_s
    clock.now_s += FIRST_PAUSE_S
    assert replica_health.note_late(asked_at, heard_at=0.0)
    assert not replica_health.is_out(heard_at=0.0)  # the pause is the first one's
