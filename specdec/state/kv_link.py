"""Connections to the cold tier's Redis, its current state, and its measurement for `specdec doctor`.

A Redis that failed or did not answer in time is not used for a while; one warning is logged until it answers again.
`kv_tier` and `kv_reader` send the commands. Any thread may call; a connection belongs to one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from specdec.contract.errors import InvalidRequest, Unavailable
from specdec.core.restore_rule import RestoreRule
from specdec.settings.redis_url import parse_redis_url

#: Time limit of an answer, or of a part of one. The caller continues without it much earlier.
SOCKET_TIMEOUT_S = 1.0
#: Time for which a Redis that failed is not used: first value, which doubles each time, and upper bound.
FIRST_RETRY_S, MAX_RETRY_S = 1.0, 30.0
#: Bytes per read of a socket; values have megabytes.
_READ_BYTES = 1 << 18

_log = logging.getLogger(__name__)


class KvLink:
    """The Redis of one tier."""

    def __init__(self, url: str) -> None:
        """Open no connection yet.

        Args:
            url: redis://, rediss:// or unix://.

        Raises:
            InvalidRequest: the URL has another form.
        """
        self.is_up = False
        """Set while Redis answers."""
        self.retry_s = FIRST_RETRY_S
        """While it is not up: time until it is tried again."""
        self.when_down: Callable[[], None] = lambda: None
        """Called after every failure."""
        self._url = url
        try:
            self._place = parse_redis_url(url).place
        except ValueError as error:
            raise InvalidRequest(f"the KV tier URL {error}", field="kv_tier_url") from error
        self._is_closed = False
        self._has_warned = False

    def connect(self, *, send_factor: float = 1.0) -> Any:
        """Return a new client, which connects at its first command.

        Args:
            send_factor: time limit for sending a command, as a multiple of the time limit of an answer.

        Raises:
            InvalidRequest: the URL has another form.
        """
        try:
            return Redis.from_url(
                self._url,
                socket_timeout=send_factor * SOCKET_TIMEOUT_S,
                socket_connect_timeout=SOCKET_TIMEOUT_S,
                socket_read_size=_READ_BYTES,
                retry=Retry(NoBackoff(), 0),
                # The same protocol for every supported version of redis-py.
                protocol=2,
            )
        except ValueError as error:
            message = f"KV tier URL {self._place!r} is malformed: {error}"
            raise InvalidRequest(message, field="kv_tier_url") from error

    def note_up(self) -> None:
        """Note that Redis answered."""
        if not self.is_up and self._has_warned:
            _log.warning("the KV tier at %s answers again", self._place)
        self.is_up, self._has_warned, self.retry_s = True, False, FIRST_RETRY_S

    def fail(self, reason: str) -> None:
        """Note a failure; Redis is not used for a while."""
        if self._is_closed:
            return
        self.retry_s = FIRST_RETRY_S if self.is_up else min(MAX_RETRY_S, 2 * self.retry_s)
        self.is_up = False
        self.warn_once(reason)
        self.when_down()

    def fail_by(self, error: Exception) -> None:
        """Note a failure with an exception as its reason; unexpected types are logged with a traceback."""
        if not isinstance(error, RedisError | OSError):
            _log.error("the KV tier failed", exc_info=error)
        self.fail(" ".join(str(error).split()).rstrip(".") or type(error).__name__)

    def warn_once(self, reason: str) -> None:
        """Log a warning, once until Redis answers again."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("KV tier at %s not available, serving without it: %s", self._place, reason)

    def warn_of_growth(self) -> None:
        """Log that Redis would never evict values."""
        _log.warning(
            "the KV tier at %s grows without bound: set its maxmemory, and maxmemory-policy allkeys-lru", self._place
        )

    def close(self) -> None:
        """Ignore failures from now on."""
        self._is_closed = True


def touch(client: Any, keys: Sequence[str]) -> list[bool]:
    """Return which keys exist; Redis counts them as used."""
    with client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.touch(key)
        return [bool(count) for count in pipeline.execute()]


_PROBE_BYTES = 1 << 20
_PROBE_TTL_S = 120
_NUM_PROBES = 5


def measure_tier(url: str) -> tuple[RestoreRule, dict[str, Any]]:
    """Return the measured side of the rule, and what the tier's Redis states about itself (INFO).

    Raises:
        InvalidRequest: the URL is malformed.
        Unavailable: Redis cannot be reached or refuses the commands of a replica (STORE_UNAVAILABLE).
    """
    client = KvLink(url).connect()
    rule = RestoreRule()
    try:
        info: dict[str, Any] = client.info()
        _measure(client, rule)
    except (RedisError, OSError) as error:
        reason = " ".join(str(error).split())
        raise Unavailable(
            f"the KV tier at {parse_redis_url(url).place}: {reason}", reason="STORE_UNAVAILABLE"
        ) from error
    finally:
        client.close()
    return rule, info


def _measure(client: Any, rule: RestoreRule) -> None:
    key = f"specdec-kv:doctor:{_PROBE_BYTES}"
    client.set(key, bytes(_PROBE_BYTES), ex=_PROBE_TTL_S)
    for _ in range(_NUM_PROBES):
        began_s = time.perf_counter()
        client.exists(key)
        answered_s = time.perf_counter()
        value = client.get(key)
        rule.observe_latency(answered_s - began_s)
        if value:
            rule.observe_transfer(len(value), time.perf_counter() - answered_s)
    client.delete(key)
