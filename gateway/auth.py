"""Access of the gateway's callers, and the limits of their keys on requests.

`specdec.access` has the key file and the tokens. The limits `concurrent` and `rpm` of a key are counted by all gateways
of a system together (`specdec.state.shared_quotas`). A gateway that does not reach their Redis counts alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from specdec.access.callers import Callers, Tokens
from specdec.access.grants import GENERATE, Access
from specdec.access.keys import hash_key
from specdec.contract.errors import ResourceExhausted, Unavailable
from specdec.contract.payer import key_id_of
from specdec.contract.tenant import DEFAULT_TENANT
from specdec.state.shared_quotas import QuotaLimits, QuotaOwner, SharedQuotas

_MINUTE_S = 60.0
#: Limit on the wait for Redis, and time for which a gateway counts alone after it did not answer.
_STORE_TIMEOUT_S = 1.0
_ALONE_S = 5.0

_log = logging.getLogger(__name__)


class _Usage:
    """The requests of one key: those that run, and the allowance of requests a minute as a bucket that refills."""

    def __init__(self, now_s: float) -> None:
        self.num_running = 0
        self._filled_s = now_s
        self._spent = 0.0
        """Requests that the refill has not paid for yet."""

    def take(self, max_per_minute: int, now_s: float) -> float:
        """Spend one request of the minute; return 0, or the seconds until there is one."""
        self._spent = max(0.0, self._spent - (now_s - self._filled_s) * max_per_minute / _MINUTE_S)
        self._filled_s = now_s
        if self._spent + 1 > max_per_minute:
            return (self._spent + 1 - max_per_minute) * _MINUTE_S / max_per_minute
        self._spent += 1
        return 0.0


class ApiKeys:
    """The keys and tokens of one gateway, and the requests of each key."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        key: str = "",
        tokens: Tokens | None = None,
        allow_anonymous: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            path: file of keys; None: no file.
            key: one key beside those of the file, without limits; "": none.
            tokens: verifies JSON web tokens; None: tokens are refused.
            allow_anonymous: whether a request without a key is answered.
            clock: seconds, for the limits and the checks of the file.

        Raises:
            InvalidRequest: the file cannot be read, is open to other users, or a line is malformed.
        """
        self._callers = Callers(
            path,
            own_keys={hash_key(key): Access(key_hash=hash_key(key))} if key else {},
            tokens=tokens,
            anonymous=Access() if allow_anonymous else None,
            clock=clock,
        )
        self.answers_anyone = allow_anonymous
        """True if a request without a key is answered."""
        self._usage: dict[str, _Usage] = {}
        self._clock = clock
        self._shared: SharedQuotas | None = None
        self._alone_until_s = float("-inf")

    def count_with(self, shared: SharedQuotas) -> None:
        """Count the limits of keys together with other gateways from now on."""
        self._shared = shared

    def access(self, key: str | None) -> Access:
        """Return what the holder of `key` may do.

        Raises:
            Unauthenticated: the key is unknown, or there is none although one is needed.
            Forbidden: the key lacks the right to generate.
        """
        access = self._callers.identify(key)
        access.require(GENERATE)
        return access

    @asynccontextmanager
    async def admitted(self, access: Access) -> AsyncIterator[None]:
        """Count a request of the caller while the block runs.

        Raises:
            ResourceExhausted: QUOTA_EXCEEDED; the caller has reached one of its limits.
        """
        limits = access.limits
        if limits.max_concurrent is None and limits.max_requests_per_minute is None:
            yield
            return
        usage = self._usage.setdefault(access.key_hash, _Usage(self._clock()))
        owner = QuotaOwner(access.tenant or DEFAULT_TENANT, key_id_of(access.key_hash))
        shared = self._shared if self._clock() >= self._alone_until_s else None
        is_shared = shared is not None and await self._take(shared, owner, access, usage)
        if not is_shared:
            self._require_quota(access, usage)
        usage.num_running += 1
        if shared is not None and is_shared:
            shared.entered(owner)
        try:
            yield
        finally:
            usage.num_running -= 1
            if self._shared is not None:
                self._shared.note_end(owner)

    async def _take(self, shared: SharedQuotas, owner: QuotaOwner, access: Access, usage: _Usage) -> bool:
        """Ask Redis for a request; return False if it does not answer. Raises ResourceExhausted."""
        limits = QuotaLimits(access.limits.max_concurrent, access.limits.max_requests_per_minute, None)
        try:
            async with asyncio.timeout(_STORE_TIMEOUT_S):
                refusal = await shared.take(owner, limits, lambda: usage.num_running)
        except (Unavailable, TimeoutError) as error:
            self._alone_until_s = self._clock() + _ALONE_S
            _log.warning("Redis does not answer, so this gateway counts the limits of keys alone: %s", error)
            return False
        if refusal is None:
            return True
        raise _exceeded(access, refusal.limit, refusal.retry_after_s)

    def _require_quota(self, access: Access, usage: _Usage) -> None:
        """Apply the limits to the requests of this gateway. Raises ResourceExhausted."""
        limits = access.limits
        if limits.max_concurrent is not None and usage.num_running >= limits.max_concurrent:
            raise _exceeded(access, "streams", 1.0)
        per_minute = limits.max_requests_per_minute
        if per_minute is not None and (wait_s := usage.take(per_minute, self._clock())):
            raise _exceeded(access, "requests", wait_s)


def _exceeded(access: Access, limit: str, retry_after_s: float) -> ResourceExhausted:
    words = {
        "streams": f"may have {access.limits.max_concurrent} requests at once",
        "requests": f"may send {access.limits.max_requests_per_minute} requests a minute",
    }
    return ResourceExhausted(f"this API key {words[limit]}", reason="QUOTA_EXCEEDED", retry_after_s=retry_after_s)
