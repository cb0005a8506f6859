"""Limits on what one tenant may use at one coordinator: sessions, prompts and reserved tokens.

Streams, requests and tokens a minute are counted by all coordinators together (`specdec.state.shared_quotas`). A limit
refuses new requests only: a running stream goes on beyond its tenant's limits.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import fields

from specdec.access.grants import Limits
from specdec.contract.errors import ResourceExhausted
from specdec.contract.tenant import SessionKey

#: Number of tenants whose sessions are remembered. A forgotten one begins with none.
MAX_TENANTS = 4096

#: Time after which a stream of the tenant may have ended.
STREAM_RETRY_S = 1.0


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
            limits_of: returns the limits of a tenant; called for each check.
            session_ttl_s: time for which an idle session is kept.
            clock: seconds.
        """
        self._limits_of = limits_of
        self._session_ttl_s = session_ttl_s
        self._clock = clock
        self._sessions: OrderedDict[str, OrderedDict[str, float]] = OrderedDict()
        """Times at which sessions were last used, the oldest first, by tenant."""
        self._reserved: Counter[str] = Counter()
        """Tokens that the requests of a tenant may reach, above 0. Kept for every tenant that runs one."""

    def limits_of(self, tenant: str) -> Limits:
        """Return the limits of a tenant."""
        return self._limits_of(tenant)

    def check_prompt(self, tenant: str, num_tokens: int) -> None:
        """Check the length of a prompt. Raises ResourceExhausted without a time to retry."""
        most = self._limits_of(tenant).max_prompt_tokens
        if most is not None and num_tokens > most:
            error = exceeded(f"{most} prompt tokens, and this prompt has {num_tokens}", 0.0)
            error.retry_after_s = None  # the same prompt is refused again
            raise error

    def check_reserved(self, tenant: str, num_tokens: int) -> None:
        """Check whether a request that may reach `num_tokens` tokens fits beside the tenant's others.

        Raises:
            ResourceExhausted: without a time to retry if it alone exceeds the limit.
        """
        most, held = self._limits_of(tenant).max_reserved_tokens, self._reserved[tenant]
        if most is not None and held + num_tokens > most:
            error = exceeded(
                f"{most} reserved tokens: this request may reach {num_tokens}, and others of the tenant {held}; lower "
                "max_new_tokens, or wait for them",
                STREAM_RETRY_S,
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
        most = self._limits_of(key.tenant).max_sessions
        if most is None:
            return
        used_s, now_s = self._used_s_of(key.tenant), self._clock()
        while used_s and now_s - next(iter(used_s.values())) > self._session_ttl_s:
            used_s.popitem(last=False)
        if is_new and key.session_id not in used_s and len(used_s) >= most:
            oldest_s = next(iter(used_s.values()))
            raise exceeded(f"{most} sessions; delete one that is not needed", oldest_s + self._session_ttl_s - now_s)
        used_s[key.session_id] = now_s
        used_s.move_to_end(key.session_id)

    def forget_session(self, key: SessionKey) -> None:
        """Note that a session is gone."""
        if key.tenant in self._sessions:
            self._sessions[key.tenant].pop(key.session_id, None)

    def _used_s_of(self, tenant: str) -> OrderedDict[str, float]:
        used_s = self._sessions.pop(tenant, None)
        if used_s is None:
            used_s = OrderedDict()
        self._sessions[tenant] = used_s
        if len(self._sessions) > MAX_TENANTS:
            self._sessions.popitem(last=False)
        return used_s


def exceeded(limit: str, retry_after_s: float) -> ResourceExhausted:
    """Return the refusal of a request beyond a limit."""
    return ResourceExhausted(
        f"the tenant has reached its limit of {limit}", reason="QUOTA_EXCEEDED", retry_after_s=retry_after_s
    )


def limits_over(own: Limits, usual: Limits) -> Limits:
    """Return a tenant's own limits, with the usual ones if it has none."""
    values = {field.name: getattr(own, field.name) for field in fields(own)}
    return Limits(**{name: getattr(usual, name) if value is None else value for name, value in values.items()})
