"""Connections to the cold tier's Redis, and whether it is any use to ask it now.

A Redis that failed or did not answer in time is left alone for a while, with one warning until it answers again. Not
here: what is asked (`kv_writer`, `kv_reader`). Any thread may call; a connection belongs to one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from specdec.errors import InvalidRequest
from specdec.state.connection import describe_url

#: For an answer, or a part of one. Whoever wanted it has gone on long before.
SOCKET_TIMEOUT_S = 1.0
#: How long a Redis that failed is left alone: at first, doubled each time, and at most.
FIRST_RETRY_S, MAX_RETRY_S = 1.0, 30.0
#: Read of a socket at once: values have megabytes.
_READ_BYTES = 1 << 18

_log = logging.getLogger(__name__)


class KvLink:
    """One tier's Redis."""

    def __init__(self, url: str) -> None:
        """Connects to nothing yet.

        Args:
            url: redis://, rediss:// or unix://.
        """
        self.is_up = False
        """Whether it answered last."""
        self.retry_s = FIRST_RETRY_S
        """While it is not up: how long to leave it alone."""
        self.when_down: Callable[[], None] = lambda: None
        """Called whenever it failed."""
        self._url = url
        self._place = describe_url(url)
        self._is_closed = False
        self._has_warned = False

    def connect(self, *, patience: float = 1.0) -> Any:
        """A client of its own, which connects at its first command.

        Args:
            patience: how many times as long as an answer a command may take to send.

        Raises:
            InvalidRequest: the URL has another form.
        """
        try:
            return Redis.from_url(
                self._url,
                socket_timeout=patience * SOCKET_TIMEOUT_S,
                socket_connect_timeout=SOCKET_TIMEOUT_S,
                socket_read_size=_READ_BYTES,
                retry=Retry(NoBackoff(), 0),
                # One dialect for every client version the package admits.
                protocol=2,
            )
        except ValueError as error:
            message = f"KV tier URL {self._place!r} is malformed: {error}"
            raise InvalidRequest(message, field="kv_tier_url") from error

    def note_up(self) -> None:
        """It answered."""
        if not self.is_up and self._has_warned:
            _log.warning("the KV tier at %s answers again", self._place)
        self.is_up, self._has_warned, self.retry_s = True, False, FIRST_RETRY_S

    def fail(self, reason: str) -> None:
        """It is to be left alone for a while."""
        if self._is_closed:
            return
        self.retry_s = FIRST_RETRY_S if self.is_up else min(MAX_RETRY_S, 2 * self.retry_s)
        self.is_up = False
        self.warn_once(reason)
        self.when_down()

    def fail_by(self, error: Exception) -> None:
        """As `fail`, whatever `error` is."""
        if not isinstance(error, RedisError | OSError):
            _log.error("the KV tier failed", exc_info=error)
        self.fail(" ".join(str(error).split()).rstrip(".") or type(error).__name__)

    def warn_once(self, reason: str) -> None:
        """Until it answers again."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("serving without the KV tier at %s for now: %s", self._place, reason)

    def warn_of_growth(self) -> None:
        """It would not forget by itself."""
        _log.warning(
            "the KV tier at %s grows without bound: give it a maxmemory and maxmemory-policy allkeys-lru", self._place
        )

    def close(self) -> None:
        """Failures are none from now on."""
        self._is_closed = True


def touch(client: Any, keys: Sequence[str]) -> list[bool]:
    """Which keys are there; they count as used."""
    with client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.touch(key)
        return [bool(count) for count in pipeline.execute()]
