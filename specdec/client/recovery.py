"""Decides whether a failed call is retried, how soon and for how long. Both clients share it; it makes no call."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import tenacity

from specdec.client.failures import is_without_target
from specdec.contract.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LeaseLost,
    ResourceExhausted,
    SessionBusy,
    SpecdecError,
    StaleEpoch,
    Unavailable,
)

# Longest timeout of a call, thirty years: gRPC treats a much later deadline as one that has passed.
_LONGEST_S = 1e9

#: Options of every channel of a client. gRPC's reconnect backoff (up to two minutes by default) must stay below ours.
CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also the limit of one attempt to connect; 20 s by default
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),  # 30 s by default, in which all addresses of a name may change
    ("grpc.keepalive_time_ms", 5_000),  # while a call is open: detects a coordinator whose machine has failed
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # a minute by default, regardless of the line above
    ("grpc.http2.max_pings_without_data", 0),  # a stream that waits sends no data
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", -1),  # the server's limit decides, and its error states it
)


@dataclass(frozen=True, slots=True)
class Budgets:
    """Seconds for which a client retries before it raises."""

    connect_s: float = 5.0
    """Limit for a call that has had no answer yet."""
    target_s: float | None = None
    """Limit for a generation while the coordinator reports no target replica: a restart may take half a minute. None:
    `connect_s`."""
    resume_s: float = 60.0
    """Limit for an interrupted stream, restarted by each chunk; longer than the lease of a lost coordinator."""


class Recovery:
    """Retry policy of one call. Progress resets its budget. Two calls must not share one."""

    def __init__(self, budgets: Budgets, timeout: float | None = None, *, needs_target: bool = False) -> None:
        """
        Args:
            budgets: limits on the time for which to retry.
            timeout: seconds from now that the whole call may take, all attempts together; None: no limit.
            needs_target: whether `Budgets.target_s` applies to the call.

        Raises:
            InvalidRequest: the timeout is not a positive number.
        """
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (is_number and 0 < timeout < math.inf):
            raise InvalidRequest(f"timeout must be a number of seconds above 0, got {timeout!r}", field="timeout")
        self._budgets = budgets
        self._target_s = budgets.target_s if needs_target else None
        self._timeout = timeout = None if timeout is None else min(timeout, _LONGEST_S)
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._answered = False
        self._has_new_tokens = False
        self._broken_since: float | None = None
        self._failure: BaseException | None = None
        """Error of the last attempt that ended before the timeout."""
        self._backoff = tenacity.wait_random_exponential(multiplier=0.05, max=1.0)

    def answered(self, *, with_new_tokens: bool) -> None:
        """Note a received message. Only one with new tokens restarts the budget of the next interruption.

        Otherwise a server that begins every attempt and then fails it would be called for ever.
        """
        self._answered = True
        if with_new_tokens:
            self._has_new_tokens = True
            self._broken_since = None

    @property
    def was_answered(self) -> bool:
        """True once a message of the call was received."""
        return self._answered

    @property
    def remaining_s(self) -> float | None:
        """Seconds left of the call's timeout, at least 0; None without a timeout."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def tenacity_options(self) -> dict[str, Any]:
        """Return the arguments for `tenacity.Retrying` and `AsyncRetrying`."""
        return {
            "retry": tenacity.retry_if_exception(self._worth_retrying),
            "stop": self._exhausted,
            "wait": self._wait_s,
            "retry_error_callback": self._give_up,
        }

    def _worth_retrying(self, error: BaseException) -> bool:
        """Return whether a retry may succeed. It is safe: the same request id joins what an earlier attempt began."""
        if isinstance(error, ResourceExhausted) and not error.retryable:
            return False
        # The session may be busy with our own earlier attempt, whose lease has not expired yet.
        is_temporary = isinstance(error, Unavailable | LeaseLost | StaleEpoch | SessionBusy | ResourceExhausted)
        if is_temporary or (isinstance(error, SpecdecError) and error.retryable):
            if self._broken_since is None:
                self._broken_since = time.monotonic()
            # A lost lease means that the request had begun. Its new owner may hold it for longer than `connect_s`.
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
        # A server without room for a new request may never have any, so only an output under way waits for long.
        has_begun = self._has_new_tokens if isinstance(error, ResourceExhausted) else self._answered
        budget_s = self._budgets.resume_s if has_begun else self._budgets.connect_s
        if self._target_s is not None and is_without_target(error):
            budget_s = max(budget_s, self._target_s)
        # The next attempt would begin after the budget, so its wait is skipped.
        return time.monotonic() + state.upcoming_sleep - self._broken_since >= budget_s

    def _is_late(self, state: tenacity.RetryCallState) -> bool:
        """Return whether the next attempt would begin after the deadline."""
        return self._deadline is not None and time.monotonic() + state.upcoming_sleep >= self._deadline

    def _give_up(self, state: tenacity.RetryCallState) -> NoReturn:
        error = state.outcome.exception() if state.outcome else None
        assert error is not None  # tenacity calls this after a failed attempt only
        if self._is_late(state):
            raise DeadlineExceeded(f"{self._timeout_message()} ({self._failure or error})") from error
        raise error

    def _timeout_message(self) -> str:
        left_s = self.remaining_s or 0.0
        if not left_s:
            return f"the call did not end within its timeout of {self._timeout:g} s"
        return (
            f"the call ended {left_s:.1f} s before its timeout of {self._timeout:g} s, because the next attempt would "
            "begin after it"
        )

    def _wait_s(self, state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        retry_after_s = error.retry_after_s if isinstance(error, SpecdecError) else None
        return max(self._backoff(state), retry_after_s or 0.0)


def ended_early() -> Unavailable:
    """Return the error of a stream that closed without `Finished`."""
    return Unavailable("the server closed the stream before it finished")
