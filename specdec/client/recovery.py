"""When a broken call is tried again, how soon and for how long. Shared by both clients; makes no call itself."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import tenacity

from specdec.client.failures import is_without_target
from specdec.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LeaseLost,
    ResourceExhausted,
    SessionBusy,
    SpecdecError,
    StaleEpoch,
    Unavailable,
)

# What a call may take at most, thirty years: gRPC takes a deadline that is much later for one that is over.
_LONGEST_S = 1e9

#: The channel's own backoff (up to two minutes by default) must not outlast ours.
CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also how long one attempt to connect may take; 20 s by default
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),  # 30 s by default, while a name's addresses may all be new
    ("grpc.keepalive_time_ms", 5_000),  # while a call is open: notices a coordinator whose machine is gone
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # a minute by default, whatever the line above says
    ("grpc.http2.max_pings_without_data", 0),  # a stream that waits long says nothing meanwhile
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", -1),  # the server's limit decides, and names itself
)


@dataclass(frozen=True, slots=True)
class Budgets:
    """How long a client keeps trying before it raises."""

    connect_s: float = 5.0
    """A call that has had no answer yet."""
    target_s: float | None = None
    """A generation to which a coordinator says that no target replica is there: one that is started again may take half
    a minute. None: `connect_s`."""
    resume_s: float = 60.0
    """An interrupted stream, counted anew after each chunk; more than a lost coordinator's lease lasts."""


class Recovery:
    """Decides on retries of one call; reset by progress. Not for use by two calls at once."""

    def __init__(self, budgets: Budgets, timeout: float | None = None, *, needs_target: bool = False) -> None:
        """
        Args:
            budgets: how long to keep trying.
            timeout: seconds that the whole call may take from now on, all attempts together; None: no limit.
            needs_target: whether `Budgets.target_s` counts for it.

        Raises:
            InvalidRequest: a timeout that is no positive number.
        """
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (is_number and 0 < timeout < math.inf):
            raise InvalidRequest(f"timeout must be a number of seconds above 0, got {timeout!r}", field="timeout")
        self._budgets = budgets
        self._target_s = budgets.target_s if needs_target else None
        self._timeout = timeout = None if timeout is None else min(timeout, _LONGEST_S)
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._answered = False
        self._has_news = False
        self._broken_since: float | None = None
        self._failure: BaseException | None = None
        """Why the last attempt failed that was not cut short by the timeout."""
        self._backoff = tenacity.wait_random_exponential(multiplier=0.05, max=1.0)

    def answered(self, *, with_news: bool) -> None:
        """A message has come. Only one with news gives the next interruption its whole budget again.

        A server that begins every attempt well and then fails it must not be asked for ever.
        """
        self._answered = True
        if with_news:
            self._has_news = True
            self._broken_since = None

    @property
    def remaining_s(self) -> float | None:
        """What is left of the call's timeout, at least 0; None where it has none."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def tenacity_options(self) -> dict[str, Any]:
        """Arguments for `tenacity.Retrying` and `AsyncRetrying`."""
        return {
            "retry": tenacity.retry_if_exception(self._worth_retrying),
            "stop": self._exhausted,
            "wait": self._wait_s,
            "retry_error_callback": self._give_up,
        }

    def _worth_retrying(self, error: BaseException) -> bool:
        """Whether it passes by itself. Asking again is safe: under the same request id, what was begun is joined."""
        # A busy session may be our own earlier attempt's, whose lease has yet to expire.
        if isinstance(error, Unavailable | LeaseLost | StaleEpoch | SessionBusy | ResourceExhausted):
            if self._broken_since is None:
                self._broken_since = time.monotonic()
            # A lease is lost by what had begun, and whoever has it now may keep it for longer than a beginning is
            # waited for.
            self._answered |= isinstance(error, LeaseLost | StaleEpoch)
            if self._failure is None or self.remaining_s != 0:
                self._failure = error
            return True
        return False

    def _exhausted(self, state: tenacity.RetryCallState) -> bool:
        if self._is_late(state):
            return True
        if self._broken_since is None:
            return False
        error = state.outcome.exception() if state.outcome else None
        # What has no room for a request may never have: an output under way is worth a longer wait than a beginning.
        has_begun = self._has_news if isinstance(error, ResourceExhausted) else self._answered
        budget_s = self._budgets.resume_s if has_begun else self._budgets.connect_s
        if self._target_s is not None and is_without_target(error):
            budget_s = max(budget_s, self._target_s)
        # Rather now than after a wait that would outlast the budget.
        return time.monotonic() + state.upcoming_sleep - self._broken_since >= budget_s

    def _is_late(self, state: tenacity.RetryCallState) -> bool:
        """Whether the next attempt would begin after the deadline."""
        return self._deadline is not None and time.monotonic() + state.upcoming_sleep >= self._deadline

    def _give_up(self, state: tenacity.RetryCallState) -> NoReturn:
        error = state.outcome.exception() if state.outcome else None
        assert error is not None  # only a failed attempt is given up
        if self._is_late(state):
            raise DeadlineExceeded(f"{self._replica_health()} ({self._failure or error})") from error
        raise error

    def _replica_health(self) -> str:
        left_s = self.remaining_s or 0.0
        if not left_s:
            return f"the call was not done within its timeout of {self._timeout:g} s"
        return (
            f"the call was given up {left_s:.1f} s before its timeout of {self._timeout:g} s, after which the next "
            "attempt would have begun"
        )

    def _wait_s(self, state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked_s = error.retry_after_s if isinstance(error, SpecdecError) else None
        return max(self._backoff(state), asked_s or 0.0)


def ended_early() -> Unavailable:
    """A stream that closed without `Finished`."""
    return Unavailable("the server closed the stream before it finished")
