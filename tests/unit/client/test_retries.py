"""The retry policy of a client on a fake clock: after which errors, how soon, and until which budget is spent."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import tenacity

from specdec.client.recovery import Budgets, Recovery, ended_early
from specdec.contract.errors import (
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

#: Longer than the longest backoff, so that every pause has the length that the server asked for.
RETRY_AFTER_S = 1.0


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
    """Return the start of each attempt in seconds after the first, until one succeeds or the last error is raised."""
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
def test_a_temporary_error_is_retried_while_the_next_attempt_begins_within_the_budget(
    clock: Clock, kind: type[SpecdecError], num_s: int
) -> None:
    assert attempts_at(clock, Recovery(BUDGETS), failing(kind("later", retry_after_s=RETRY_AFTER_S))) == seconds(num_s)


@pytest.mark.parametrize(
    ("timeout", "num_s", "left"), [(3.5, 4, "0.5"), (3.0, 3, "1.0"), (4.5, 5, "0.5"), (0.5, 1, "0.5")]
)
def test_no_attempt_begins_at_or_after_the_deadline_and_the_error_quotes_the_last_failure(
    clock: Clock, timeout: float, num_s: int, left: str
) -> None:
    recovery, at = Recovery(BUDGETS, timeout), list[float]()
    error = Unavailable("gone", retry_after_s=RETRY_AFTER_S)

    def attempt() -> None:
        at.append(clock.now - 100.0)
        raise error

    with pytest.raises(DeadlineExceeded) as raised:
        tenacity.Retrying(sleep=clock.sleep, **recovery.tenacity_options())(attempt)
    assert at == seconds(num_s)
    ended = f"the call ended {left} s before its timeout of {timeout:g} s"
    assert raised.value.message == f"{ended}, because the next attempt would begin after it (gone)"
    assert raised.value.__cause__ is error


def test_the_error_of_a_call_whose_last_attempt_outlasts_its_timeout_names_the_timeout(clock: Clock) -> None:
    def attempt() -> None:
        clock.now += 2.5
        raise Unavailable("gone")

    with pytest.raises(DeadlineExceeded) as raised:
        tenacity.Retrying(sleep=clock.sleep, **Recovery(BUDGETS, 2).tenacity_options())(attempt)
    assert raised.value.message == "the call did not end within its timeout of 2 s (gone)"


def test_the_time_left_counts_from_the_call_and_is_never_negative(clock: Clock) -> None:
    unlimited, limited = Recovery(BUDGETS), Recovery(BUDGETS, 3)
    left = []
    for _ in range(3):
        left.append(limited.remaining_s)
        clock.now += 2.0
    assert left == [3.0, 1.0, 0.0]
    assert unlimited.remaining_s is None


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan"), "1", True])
def test_a_timeout_that_is_not_a_positive_number_is_refused(timeout: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Recovery(BUDGETS, timeout)
    assert refused.value.message == f"timeout must be a number of seconds above 0, got {timeout!r}"
    assert refused.value.field == "timeout"


@pytest.mark.parametrize("kind", [LeaseLost, StaleEpoch])
def test_after_a_lost_lease_the_budget_of_an_output_under_way_applies(clock: Clock, kind: type[SpecdecError]) -> None:
    def attempt(index: int) -> None:
        raise (
            kind("lost", retry_after_s=RETRY_AFTER_S)
            if index == 0
            else SessionBusy("busy", retry_after_s=RETRY_AFTER_S)
        )

    assert attempts_at(clock, Recovery(BUDGETS), failing(kind("later", retry_after_s=RETRY_AFTER_S))) == seconds(20)
    assert attempts_at(clock, Recovery(BUDGETS), attempt) == seconds(20)  # the lease's new owner


def test_a_timeout_longer_than_the_budget_leaves_the_error_unchanged(clock: Clock) -> None:
    with pytest.raises(Unavailable, match="later"):
        tenacity.Retrying(sleep=clock.sleep, **Recovery(BUDGETS, timeout=60).tenacity_options())(
            failing(Unavailable("later", retry_after_s=RETRY_AFTER_S)), 0
        )


@pytest.mark.parametrize("error", [NotFound("none"), SessionLost("gone"), InvalidRequest("bad"), SpecdecError("odd")])
def test_a_permanent_error_is_raised_unchanged_after_one_attempt(clock: Clock, error: SpecdecError) -> None:
    recovery = Recovery(BUDGETS)
    with pytest.raises(type(error)) as raised:
        tenacity.Retrying(sleep=clock.sleep, **recovery.tenacity_options())(failing(error), 0)
    assert raised.value is error
    assert clock.now == 100.0


def test_when_the_budget_is_spent_the_last_error_is_raised_unchanged(clock: Clock) -> None:
    errors = [Unavailable(f"attempt {index}", retry_after_s=RETRY_AFTER_S) for index in range(10)]
    left = iter(errors)

    def attempt() -> None:
        raise next(left)

    with pytest.raises(Unavailable) as raised:
        tenacity.Retrying(sleep=clock.sleep, **Recovery(BUDGETS).tenacity_options())(attempt)
    assert raised.value is errors[4]


def test_the_budget_starts_at_the_first_failure_and_not_at_the_call(clock: Clock) -> None:
    def attempt(index: int) -> None:
        if index == 0:
            clock.now += 50.0
        raise Unavailable("later", retry_after_s=RETRY_AFTER_S)

    assert attempts_at(clock, Recovery(BUDGETS), attempt) == [0.0, *(50.0 + second for second in (1, 2, 3, 4))]


def test_a_call_that_was_answered_has_the_longer_budget_which_only_new_tokens_restart(clock: Clock) -> None:
    recovery = Recovery(BUDGETS)

    def attempt(index: int) -> None:
        recovery.answered(with_new_tokens=index == 7)
        raise Unavailable("broken off", retry_after_s=RETRY_AFTER_S)

    assert attempts_at(clock, recovery, attempt) == seconds(7 + 20)


@pytest.mark.parametrize(("with_new_tokens", "num_s"), [(False, 5), (True, 20)])
def test_a_full_server_gets_the_longer_budget_only_for_an_output_under_way(
    clock: Clock, with_new_tokens: bool, num_s: int
) -> None:
    recovery = Recovery(BUDGETS)
    recovery.answered(with_new_tokens=with_new_tokens)
    assert attempts_at(clock, recovery, failing(ResourceExhausted("full", retry_after_s=RETRY_AFTER_S))) == seconds(
        num_s
    )


def test_pauses_are_random_and_their_limit_doubles_up_to_a_second(clock: Clock) -> None:
    longest = [0.0] * 12

    def attempt(index: int) -> None:
        if index < len(longest):
            raise Unavailable("gone", retry_after_s=0.0)

    for _ in range(100):  # no pause comes near its limit with probability 2^-100
        at = attempts_at(clock, Recovery(Budgets(connect_s=1000.0)), attempt)
        pauses = [after - before for before, after in itertools.pairwise(at)]
        longest = [max(known, pause) for known, pause in zip(longest, pauses, strict=True)]
    limits = [min(0.05 * 2**index, 1.0) for index in range(len(longest))]
    assert all(limit / 2 < pause <= limit + 1e-9 for pause, limit in zip(longest, limits, strict=True))


def test_the_error_of_a_stream_that_closed_early_says_so() -> None:
    assert ended_early().message == "the server closed the stream before it finished"


@pytest.mark.parametrize("timeout", [8e9, 1e300, 10**400])
def test_a_timeout_beyond_the_longest_deadline_is_shortened_to_it(timeout: float) -> None:
    """gRPC would treat a much later deadline as one that has passed."""
    remaining_s = Recovery(BUDGETS, timeout).remaining_s
    assert remaining_s is not None
    assert 9e8 < remaining_s <= 1e9
