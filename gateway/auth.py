"""Access of the gateway's callers, and the limits of their keys on requests.

`specdec.access` has the key file and the tokens. The limits `concurrent` and `rpm` of a key are counted here, in this
process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec.access.callers import Callers, Tokens
from specdec.access.grants import GENERATE, Access
from specdec.access.keys import hash_key
from specdec.contract.errors import ResourceExhausted

_MINUTE_S = 60.0


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

    def access(self, key: str | None) -> Access:
        """Return what the holder of `key` may do.

        Raises:
            Unauthenticated: the key is unknown, or there is none although one is needed.
            Forbidden: the key lacks the right to generate.
        """
        access = self._callers.identify(key)
        access.require(GENERATE)
        return access

    @contextmanager
    def admitted(self, access: Access) -> Iterator[None]:
        """Count a request of the caller while the block runs.

        Raises:
            ResourceExhausted: QUOTA_EXCEEDED; the caller has reached one of its limits.
        """
        limits = access.limits
        if limits.max_concurrent is None and limits.max_requests_per_minute is None:
            yield
            return
        usage = self._usage.setdefault(access.key_hash, _Usage(self._clock()))
        self._require_quota(access, usage)
        usage.num_running += 1
        try:
            yield
        finally:
            usage.num_running -= 1

    def _require_quota(self, access: Access, usage: _Usage) -> None:
        limits = access.limits
        if limits.max_concurrent is not None and usage.num_running >= limits.max_concurrent:
            raise ResourceExhausted(
                f"this API key may have {limits.max_concurrent} requests at once", reason="QUOTA_EXCEEDED"
            )
        per_minute = limits.max_requests_per_minute
        if per_minute is not None and (wait_s := usage.take(per_minute, self._clock())):
            raise ResourceExhausted(
                f"this API key may send {per_minute} requests a minute", reason="QUOTA_EXCEEDED", retry_after_s=wait_s
            )
