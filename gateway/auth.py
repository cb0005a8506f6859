"""API keys: who may send requests, for which tenant, and how many.

A key file has one key a line: `SHA256 TENANT RIGHTS [LIMITS]`. SHA256 is the key's hash in hexadecimal; RIGHTS are
`generate`, `operate` and `service`, joined by commas; LIMITS are `concurrent=N` (requests at once) and `rpm=N`
(requests a minute), joined by commas and counted in this process. Lines that are empty or begin with # are skipped.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import Forbidden, InvalidRequest, ResourceExhausted, SpecdecError, Unauthenticated
from specdec.tenant import check_tenant

#: Right that a key needs for every request of this gateway.
GENERATE = "generate"

_RIGHTS = frozenset((GENERATE, "operate", "service"))
_LIMITS = ("concurrent", "rpm")
_HASH_CHARACTERS = 64
#: Interval of the checks whether the file has changed.
_CHECK_INTERVAL_S = 1.0
_MINUTE_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Access:
    """Rights, tenant and limits of a caller."""

    tenant: str = ""
    """Tenant of the caller's requests; "" for the coordinator's own."""
    rights: frozenset[str] = frozenset((GENERATE,))
    max_concurrent: int | None = None
    """Limit on the caller's requests at once; None: no limit."""
    max_per_minute: int | None = None
    """Limit on the caller's requests in a minute; None: no limit."""
    key_hash: str = ""
    """SHA-256 of the key; "" for a caller without one."""


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
    """The keys of one gateway. The file is read again when it changes; a file with a mistake leaves the old keys."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        key: str = "",
        allow_anonymous: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            path: file of keys; None: no file.
            key: one key beside those of the file, without limits; "": none.
            allow_anonymous: whether a request without a key is answered.
            clock: seconds, for the limits and the checks of the file.

        Raises:
            InvalidRequest: the file cannot be read, or a line is malformed.
        """
        self._path, self._allow_anonymous, self._clock = path, allow_anonymous, clock
        self._own = {_hash(key): Access(key_hash=_hash(key))} if key else {}
        self._usage: dict[str, _Usage] = {}
        self._version: tuple[int, int, int] | None = None
        self._checked_s = clock()
        self._keys: Mapping[str, Access] = dict(self._own)
        if path is not None:
            self._read(path)

    def access(self, key: str | None) -> Access:
        """Return what the holder of `key` may do.

        Keys are found by their hash: how long that takes tells a caller nothing about any key.

        Raises:
            Unauthenticated: the key is unknown, or there is none where one is needed.
            Forbidden: the key lacks the right to generate.
        """
        self._reload_if_changed()
        if not key:
            if self._allow_anonymous:
                return Access()
            raise Unauthenticated("an API key is needed: send the header authorization: Bearer KEY")
        access = self._keys.get(_hash(key))
        if access is None:
            if not self._keys and self._allow_anonymous:
                return Access()  # clients that always send a key reach a gateway that has none
            raise Unauthenticated("the API key is unknown")
        if GENERATE not in access.rights:
            raise Forbidden(f"this API key has not the right {GENERATE}; it has {', '.join(sorted(access.rights))}")
        return access

    @contextmanager
    def admitted(self, access: Access) -> Iterator[None]:
        """Count a request of the caller while the block runs.

        Raises:
            ResourceExhausted: QUOTA_EXCEEDED; the caller has reached one of its limits.
        """
        if access.max_concurrent is None and access.max_per_minute is None:
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
        if access.max_concurrent is not None and usage.num_running >= access.max_concurrent:
            raise ResourceExhausted(
                f"this API key may have {access.max_concurrent} requests at once", reason="QUOTA_EXCEEDED"
            )
        if access.max_per_minute is not None and (wait_s := usage.take(access.max_per_minute, self._clock())):
            raise ResourceExhausted(
                f"this API key may send {access.max_per_minute} requests a minute",
                reason="QUOTA_EXCEEDED",
                retry_after_s=wait_s,
            )

    def _reload_if_changed(self) -> None:
        now_s = self._clock()
        if self._path is None or now_s - self._checked_s < _CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        try:
            if _version_of(self._path) != self._version:
                self._read(self._path)
                _log.info("API keys read again", extra={"num_keys": len(self._keys)})
        except (OSError, SpecdecError) as error:
            _log.error("cannot read the API keys again, keeping the old ones: %s", error)

    def _read(self, path: Path) -> None:
        try:
            self._version = _version_of(path)  # also of a file with a mistake, which is reported once
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"api_keys: cannot read {path}: {error}", field="api_keys") from error
        self._keys = {**parse_keys(text), **self._own}


def parse_keys(text: str) -> dict[str, Access]:
    """Return the keys of a key file, by hash.

    Raises:
        InvalidRequest: a line is malformed; the message has its number and never its hash.
    """
    keys: dict[str, Access] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            access = _parse_line(words)
        except (ValueError, InvalidRequest) as error:
            raise InvalidRequest(f"api_keys: line {number}: {error}", field="api_keys") from None
        if access.key_hash in keys:
            raise InvalidRequest(f"api_keys: line {number}: this key has a line before", field="api_keys")
        keys[access.key_hash] = access
    return keys


def _parse_line(words: list[str]) -> Access:
    if not 3 <= len(words) <= 4:
        raise ValueError(f"must be SHA256 TENANT RIGHTS [LIMITS], got {len(words)} words")
    key_hash, tenant, rights = words[0].lower(), check_tenant(words[1]), frozenset(words[2].split(","))
    if len(key_hash) != _HASH_CHARACTERS or not set(key_hash) <= set("0123456789abcdef"):
        raise ValueError(f"the key's SHA-256 must be {_HASH_CHARACTERS} hexadecimal digits")
    if not rights <= _RIGHTS:
        raise ValueError(f"rights must be among {', '.join(sorted(_RIGHTS))}, got {words[2][:64]!r}")
    limits = _parse_limits(words[3]) if len(words) == 4 else {}
    return Access(tenant, rights, limits.get("concurrent"), limits.get("rpm"), key_hash)


def _parse_limits(text: str) -> dict[str, int]:
    limits = {}
    for limit in text.split(","):
        name, _, number = limit.partition("=")
        if name not in _LIMITS or not (number.isascii() and number.isdecimal() and 0 < int(number) < 1 << 31):
            raise ValueError(f"a limit must be {' or '.join(f'{name}=N' for name in _LIMITS)}, got {limit[:64]!r}")
        limits[name] = int(number)
    return limits


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _version_of(path: Path) -> tuple[int, int, int]:
    """Return what differs after every change of the file, also after a replacement."""
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino
