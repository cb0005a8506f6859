"""When a client asks again: after which errors, how soon, and until which budget is spent; on a clock that is told."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import tenacity

from specdec.client.recovery import Budgets, Recovery, ended_early
from specdec.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LeaseLost,
    NotFound,
    ResourceExhausted,
    SessionBusy,
    SessionLost,
    SpecdecError,
    StaleEpoch,
    Unavailable,
)

BUDGETS = Budgets(connect_s=5.0, resume_s=20.0)

#: More than the longest pause of its own, so that every pause is as long as the server asked.
ASKED_S = 1.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("specdec.client.recovery.time", SimpleNamespace(monotonic=clock))
    return clock


def attempts_at(clock: Clock, recovery: Recovery, attempt: Callable[[int], None]) -> list[float]:
    """Seconds from the first attempt at which each was made, until one succeeds or the last one's error is raised."""
    began, at = clock.now, list[float]()

    def call() -> None:
        at.append(clock.now - began)
        attempt(len(at) - 1)

    with suppress(SpecdecError):
        tenacity.Retrying(sleep=clock.sleep, **recovery.tenacity_options())(call)
    return at


def failing(error: SpecdecError) -> Callable[[int], None]:
    def attempt(index: int) -> None:
        raise error

    return attempt


def seconds(num_s: int) -> list[float]:
    return [float(second) for second in range(num_s)]


@pytest.mark.parametrize(
    ("kind", "num_s"),
    [(Unavailable, 5), (SessionBusy, 5), (ResourceExhausted, 5), (LeaseLost, 20), (StaleEpoch, 20)],
)
def test_what_passes_by_itself_is_asked_again_while_the_next_attempt_is_within_the_budget(
    clock: Clock, kind: type[SpecdecError], num_s: int
) -> None:
    assert attempts_at(clock, Recovery(BUDGETS), failing(kind("later", retry_after_s=ASKED_S))) == seconds(num_s)


@pytest.mark.parametrize(
    ("timeout", "num_s", "left"), [(3.5, 4, "0.5"), (3.0, 3, "1.0"), (4.5, 5, "0.5"), (0.5, 1, "0.5")]
)
def test_no_attempt_begins_at_a_calls_deadline_or_after_it_and_the_last_error_is_named(
    clock: Clock, timeout: float, num_s: int, left: str
) -> None:
    recovery, at = Recovery(BUDGETS, timeout), list[float]()
    error = Unavailable("gone", retry_after_s=ASKED_S)

    def attempt() -> None:
        at.append(clock.now - 100.0)
        raise error

    with pytest.raises(DeadlineExceeded) as raised:
        tenacity.Retrying(sleep=clock.sleep, **recovery.tenacity_options())(attempt)
    assert at == seconds(num_s)
    told = (
        f"the call was given up {left} s before its timeout of {timeout:g} s, after which the next attempt would have"
    )
    assert raised.value.message == f"{told} begun (gone)"
    assert raised.value.__cause__ is error


def test_a_call_whose_last_attempt_outlasts_its_timeout_was_not_done_within_it(clock: Clock) -> None:
    def attempt() -> None:
        clock.now += 2.5
        raise Unavailable("gone")

    with pytest.raises(DeadlineExceeded) as raised:
        tenacity.Retrying(sleep=clock.sleep, **Recovery(BUDGETS, 2).tenacity_options())(attempt)
    assert raised.value.message == "the call was not done within its timeout of 2 s (gone)"


def test_what_is_left_of_a_timeout_counts_from_the_call_and_is_never_below_nothing(clock: Clock) -> None:
    unlimited, limited = Recovery(BUDGETS), Recovery(BUDGETS, 3)
    left = []
    for _ in range(3):
        left.append(limited.remaining_s)
        clock.now += 2.0
    assert left == [3.0, 1.0, 0.0]
    assert unlimited.remaining_s is None


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan"), "1", True])
def test_a_timeout_that_is_no_positive_number_is_refused(timeout: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Recovery(BUDGETS, timeout)
    assert refused.value.message == f"timeout must be a number of seconds above 0, got {timeout!r}"
    assert refused.value.field == "timeout"


@pytest.mark.parametrize("kind", [LeaseLost, StaleEpoch])
def test_a_lease_is_lost_by_what_had_begun_so_that_the_budget_of_an_output_under_way_counts(
    clock: Clock, kind: type[SpecdecError]
) -> None:
    def attempt(index: int) -> None:
        raise kind("lost", retry_after_s=ASKED_S) if index == 0 else SessionBusy("busy", retry_after_s=ASKED_S)

    assert attempts_at(clock, Recovery(BUDGETS), failing(kind("later", retry_after_s=ASKED_S))) == seconds(20)
    assert attempts_at(clock, Recovery(BUDGETS), attempt) == seconds(20)  # whoever has it now


def test_a_timeout_that_is_longer_than_the_budget_leaves_its_error_as_it_is(clock: Clock) -> None:
    with pytest.raises(Unavailable, match="later"):
        tenacity.Retrying(sleep=clock.sleep, **Recovery(BUDGETS, timeout=60).tenacity_options())(
            failing(Unavailable("later", retry_after_s=ASKED_S)), 0
        )


@pytest.mark.parametrize("error", [NotFound("none"), SessionLost("gone"), InvalidRequest("bad"), SpecdecError("odd")])
def test_what_asking_again_cannot_mend_is_asked_once_and_raised_as_it_is(clock: Clock, error: SpecdecError) -> None:
    recovery = Recovery(BUDGETS)
    with pytest.raises(type(error)) as raised:
        tenacity.Retrying(sleep=clock.sleep, **recovery.tenacity_options())(failing(error), 0)
    assert raised.value is error
    assert clock.now == 100.0


def test_when_the_budget_is_spent_the_last_error_is_raised_as_it_is(clock: Clock) -> None:
    errors = [Unavailable(f"attempt {index}", retry_after_s=ASKED_S) for index in range(10)]
    left = iter(errors)

    def attempt() -> None:
        raise next(left)

    with pytest.raises(Unavailable) as raised:
        tenacity.Retrying(sleep=clock.sleep, **Recovery(BUDGETS).tenacity_options())(attempt)
    assert raised.value is errors[4]


def test_the_budget_begins_with_the_first_failure_and_not_with_the_call(clock: Clock) -> None:
    def attempt(index: int) -> None:
        if index == 0:
            clock.now += 50.0
        raise Unavailable("later", retry_after_s=ASKED_S)

    assert attempts_at(clock, Recovery(BUDGETS), attempt) == [0.0, *(50.0 + second for second in (1, 2, 3, 4))]


def test_a_call_that_was_answered_has_the_longer_budget_which_only_news_renew(clock: Clock) -> None:
    recovery = Recovery(BUDGETS)

    def attempt(index: int) -> None:
        recovery.answered(with_news=index == 7)
        raise Unavailable("broken off", retry_after_s=ASKED_S)

    assert attempts_at(clock, recovery, attempt) == seconds(7 + 20)


@pytest.mark.parametrize(("with_news", "num_s"), [(False, 5), (True, 20)])
def test_a_full_server_is_waited_for_longer_only_where_an_output_is_under_way(
    clock: Clock, with_news: bool, num_s: int
) -> None:
    recovery = Recovery(BUDGETS)
    recovery.answered(with_news=with_news)
    assert attempts_at(clock, recovery, failing(ResourceExhausted("full", retry_after_s=ASKED_S))) == seconds(num_s)


def test_pauses_are_random_and_twice_as_long_each_time_up_to_a_second(clock: Clock) -> None:
    longest = [0.0] * 12

    def attempt(index: int) -> None:
        if index < len(longest):
            raise Unavailable("gone", retry_after_s=0.0)

    for _ in range(100):  # that no pause comes near its limit has a chance of 2^-100
        at = attempts_at(clock, Recovery(Budgets(connect_s=1000.0)), attempt)
        pauses = [after - before for before, after in itertools.pairwise(at)]
        longest = [max(known, pause) for known, pause in zip(longest, pauses, strict=True)]
    limits = [min(0.05 * 2**index, 1.0) for index in range(len(longest))]
    assert all(limit / 2 < pause <= limit + 1e-9 for pause, limit in zip(longest, limits, strict=True))


def test_a_stream_that_closed_early_is_unavailable_in_words() -> None:
    assert ended_early().message == "the server closed the stream before it finished"


@pytest.mark.parametrize("timeout", [8e9, 1e300, 10**400])
def test_a_timeout_later_than_any_deadline_is_as_long_as_one_can_be(timeout: float) -> None:
    """gRPC takes one that is much later for one that is over."""
    remaining_s = Recovery(BUDGETS, timeout).remaining_s
    assert remaining_s is not None
    assert 9e8 < remaining_s <= 1e9
