"""One Redis connection pool with its Lua scripts, and Redis's failures as the error tree.

Not here: what is stored. A `memory://` URL is an in-process `fakeredis`, one shared instance per process and name.
Called by `redis_store` and `registry`; nothing else talks to Redis.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, RedisError, TimeoutError

from specdec.errors import InvalidRequest, Unavailable

SCHEMES = ("redis", "rediss", "unix", "memory")

#: Seconds a connection attempt, one reply, and the wait for a free connection may take.
CONNECT_TIMEOUT_S = 2.0
REPLY_TIMEOUT_S = 2.0
POOL_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
#: Every script is idempotent, so a lost reply is asked for again; a dead server is given up after this many tries more.
NUM_RETRIES = 3
RETRY_BASE_S = 0.02
RETRY_CAP_S = 0.3

#: The Redis that the scripts are written for; the in-memory store behaves as this one.
REDIS_VERSION = (7, 0)


class RedisConnection:
    """Runs specdec's scripts and a few plain commands. Safe for any number of tasks of one event loop."""

    def __init__(self, url: str) -> None:
        """Connects lazily, at the first command.

        Args:
            url: redis://, rediss://, unix:// or memory://NAME (the name may be left out).

        Raises:
            InvalidRequest: the URL has another form.
        """
        self._place = _describe(url)
        self._client: Any = _open_client(url)
        self._scripts: dict[str, Any] = {}

    async def run_script(self, name: str, keys: Sequence[str], args: Sequence[str | bytes | int] = ()) -> Any:
        """Runs `scripts/<name>.lua`, one atomic step.

        Raises:
            Unavailable: STORE_UNAVAILABLE, within the bounds of this module's timeouts and retries.
        """
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self._client.register_script(_script_text(name))
        try:
            return await script(keys=list(keys), args=list(args))
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    async def run_command(self, *parts: str | bytes | int) -> Any:
        """Runs one plain command. Raises Unavailable as `run_script` does."""
        try:
            return await self._client.execute_command(*parts)
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    async def close(self) -> None:
        """Closes every connection. Idempotent."""
        await self._client.aclose()

    def _unavailable(self, error: Exception) -> Unavailable:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        return Unavailable(f"the store at {self._place} cannot serve: {reason}", reason="STORE_UNAVAILABLE")


def _open_client(url: str) -> Any:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise InvalidRequest(f"store URL {_describe(url)!r} must begin with redis://, rediss://, unix:// or memory://")
    if parts.scheme == "memory":
        return _open_in_memory(parts.netloc)
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=POOL_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=REPLY_TIMEOUT_S,
            retry=Retry(ExponentialBackoff(cap=RETRY_CAP_S, base=RETRY_BASE_S), NUM_RETRIES),
            retry_on_error=[ConnectionError, TimeoutError, BusyLoadingError],
            # One dialect for every client version the package admits.
            protocol=2,
        )
    except ValueError as error:
        raise InvalidRequest(f"store URL {_describe(url)!r} is malformed: {error}") from error
    return Redis.from_pool(pool)


def _open_in_memory(name: str) -> Any:
    # Only this store and the tests need the fake; a service on a real Redis never loads it.
    from fakeredis import FakeAsyncRedis

    return FakeAsyncRedis(server=_memory_server(name), protocol=2)


@cache
def _memory_server(name: str) -> Any:
    from fakeredis import FakeServer

    return FakeServer(version=REDIS_VERSION)


@cache
def _script_text(name: str) -> str:
    return (resources.files("specdec.state") / "scripts" / f"{name}.lua").read_text(encoding="utf-8")


def _describe(url: str) -> str:
    """The URL without user and password, which must not reach logs or clients."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
