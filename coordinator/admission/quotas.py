"""Limits on what one tenant may use at one coordinator: streams, requests, tokens, sessions and prompts.

`admission` asks before a request waits for a slot, and reports its tokens. A limit refuses new requests only: a running
stream goes on beyond its tenant's tokens per minute, and later requests wait until the tenant is below the limit again.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import fields

from specdec.access.grants import UNLIMITED, Limits
from specdec.contract.errors import ResourceExhausted
from specdec.contract.tenant import SessionKey

#: Number of tenants that are remembered. A forgotten one begins with full allowances.
MAX_TENANTS = 4096

_MINUTE_S = 60.0
_STREAM_RETRY_S = 1.0


class _Allowance:
    """An amount that refills to its limit within a minute. It may be overdrawn."""

    def __init__(self, now_s: float) -> None:
        self._used = 0.0
        self._limit = 0
        self._counted_s = now_s

    def missing_s(self, limit: int, now_s: float) -> float:
        """Return the time until anything is left, 0 if it is now."""
        self.use(0, now_s)
        self._limit = limit
        return max(0.0, (self._used + 1.0 - limit) * _MINUTE_S / limit)

    def use(self, amount: int, now_s: float) -> None:
        """Refill for the time since the last call, then take `amount`; a negative one is given back."""
        refilled = max(0.0, self._used - (now_s - self._counted_s) * self._limit / _MINUTE_S)
        self._used = max(0.0, refilled + amount)
        self._counted_s = now_s


class _TenantUse:
    """Use of the limits by one tenant."""

    def __init__(self, now_s: float) -> None:
        self.limits = UNLIMITED
        self.requests, self.tokens = _Allowance(now_s), _Allowance(now_s)
        self.sessions: OrderedDict[str, float] = OrderedDict()
        """Times at which sessions were last used, the oldest first."""


class TenantQuotas:
    """The limits of all tenants of one coordinator. Used from one event loop."""

    def __init__(
        self,
        limits_of: Callable[[str], Limits],
        *,
        session_ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            limits_of: returns the limits of a tenant; called for each request.
            session_ttl_s: time for which an idle session is kept.
            clock: seconds.
        """
        self._limits_of = limits_of
        self._session_ttl_s = session_ttl_s
        self._clock = clock
        self._uses: OrderedDict[str, _TenantUse] = OrderedDict()
        self._reserved: Counter[str] = Counter()
        """Tokens that the requests of a tenant may reach, above 0. Kept for every tenant that runs one."""

    def begin(self, tenant: str, num_active: int, *, is_resumption: bool) -> None:
        """Count a request of a tenant that has `num_active` others. A resumption counts among its streams alone.

        Raises:
            ResourceExhausted: QUOTA_EXCEEDED; the request is not counted.
        """
        use, now_s = self._use_of(tenant), self._clock()
        limits = use.limits = self._limits_of(tenant)
        if (most := limits.max_concurrent) is not None and num_active >= most:
            raise _exceeded(f"{most} requests at once", _STREAM_RETRY_S)
        if is_resumption:
            return
        if (most := limits.max_requests_per_minute) is not None and (left_s := use.requests.missing_s(most, now_s)):
            raise _exceeded(f"{most} requests per minute", left_s)
        if (most := limits.max_tokens_per_minute) is not None and (left_s := use.tokens.missing_s(most, now_s)):
            raise _exceeded(f"{most} tokens per minute", left_s)
        use.requests.use(1, now_s)

    def max_streams(self, tenant: str) -> int | None:
        """Return the limit on the streams of a tenant at once; None: no limit."""
        return self._limits_of(tenant).max_concurrent

    def take_back(self, tenant: str) -> None:
        """Take back a request that was counted and then did not get a slot."""
        self._use_of(tenant).requests.use(-1, self._clock())

    def count_tokens(self, tenant: str, num_tokens: int) -> None:
        """Count tokens of a request's prompt or output."""
        use = self._uses.get(tenant)
        if use is not None and use.limits.max_tokens_per_minute is not None:
            use.tokens.use(num_tokens, self._clock())

    def check_prompt(self, tenant: str, num_tokens: int) -> None:
        """Check the length of a prompt. Raises ResourceExhausted without a time to retry."""
        most = self._use_of(tenant).limits.max_prompt_tokens
        if most is not None and num_tokens > most:
            error = _exceeded(f"{most} prompt tokens, and this prompt has {num_tokens}", 0.0)
            error.retry_after_s = None  # the same prompt is refused again
            raise error

    def check_reserved(self, tenant: str, num_tokens: int) -> None:
        """Check whether a request that may reach `num_tokens` tokens fits beside the tenant's others.

        Raises:
            ResourceExhausted: without a time to retry if it alone exceeds the limit.
        """
        most, held = self._use_of(tenant).limits.max_reserved_tokens, self._reserved[tenant]
        if most is not None and held + num_tokens > most:
            error = _exceeded(
                f"{most} reserved tokens: this request may reach {num_tokens}, and others of the tenant {held}; lower "
                "max_new_tokens, or wait for them",
                _STREAM_RETRY_S,
            )
            if num_tokens > most:
                error.retry_after_s = None
            raise error

    def reserve(self, tenant: str, num_tokens: int) -> None:
        """Count tokens that a request may reach; a negative number gives them back."""
        self._reserved[tenant] += num_tokens
        if self._reserved[tenant] <= 0:
            del self._reserved[tenant]

    def use_session(self, key: SessionKey, *, is_new: bool) -> None:
        """Note that a session is used; `is_new`: this request creates it. Raises ResourceExhausted."""
        use, now_s = self._use_of(key.tenant), self._clock()
        most = use.limits.max_sessions
        if most is None:
            return
        while use.sessions and now_s - next(iter(use.sessions.values())) > self._session_ttl_s:
            use.sessions.popitem(last=False)
        if is_new and key.session_id not in use.sessions and len(use.sessions) >= most:
            oldest_s = next(iter(use.sessions.values()))
            raise _exceeded(f"{most} sessions; delete one that is not needed", oldest_s + self._session_ttl_s - now_s)
        use.sessions[key.session_id] = now_s
        use.sessions.move_to_end(key.session_id)

    def forget_session(self, key: SessionKey) -> None:
        """Note that a session is gone."""
        use = self._uses.get(key.tenant)
        if use is not None:
            use.sessions.pop(key.session_id, None)

    def _use_of(self, tenant: str) -> _TenantUse:
        use = self._uses.pop(tenant, None) or _TenantUse(self._clock())
        self._uses[tenant] = use
        if len(self._uses) > MAX_TENANTS:
            self._uses.popitem(last=False)
        return use


def _exceeded(limit: str, retry_after_s: float) -> ResourceExhausted:
    return ResourceExhausted(
        f"the tenant has reached its limit of {limit}", reason="QUOTA_EXCEEDED", retry_after_s=retry_after_s
    )


def limits_over(own: Limits, usual: Limits) -> Limits:
    """Return a tenant's own limits, with the usual ones if it has none."""
    values = {field.name: getattr(own, field.name) for field in fields(own)}
    return Limits(**{name: getattr(usual, name) if value is None else value for name, value in values.items()})
