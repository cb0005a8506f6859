"""A connection to Redis that runs Lua scripts and maps Redis's failures to the error tree.

The URL chooses what is behind it: a single server, a primary that Sentinels name, or an in-process `fakeredis`
(`clients`, `script_runner`), or a Redis Cluster (`redis_cluster`). Used by `redis_store`, `prefix_directory`,
`promotions` and `stored_responses`; the cold tier has connections of its own (`kv_link`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Protocol

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from specdec.contract.errors import InvalidRequest, InvalidSetting, Unavailable
from specdec.settings.redis_url import CLUSTER, RedisUrl, parse_redis_url
from specdec.state.clients import open_client
from specdec.state.redis_cluster import ClusterRunner, NotACluster
from specdec.state.script_runner import ScriptCall, ScriptRunner
from specdec.state.sentinel_pool import ServiceUnknown

#: Errors that waiting does not remove: the URL, its user or the rights of its user are wrong.
_WRONG_SETTINGS = (NotACluster, ServiceUnknown, AuthenticationError, AuthorizationError, NoPermissionError)


class _Servers(Protocol):
    """The servers of a URL."""

    async def run(self, name: str, calls: Sequence[ScriptCall]) -> list[Any]:
        """Return the answers of a script, as `ScriptRunner.run`."""
        ...

    async def run_command(self, *parts: Any) -> Any: ...

    async def ping(self) -> None: ...

    async def close(self) -> None: ...


class _OneServer(ScriptRunner):
    """A single server, or the primary of Sentinels."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.run_command = client.execute_command

    async def ping(self) -> None:
        await self._client.execute_command("PING")

    async def close(self) -> None:
        await super().close()
        await self._client.aclose()


class RedisConnection:
    """Runs specdec's scripts and a few plain commands. Safe for any number of tasks of one event loop."""

    def __init__(self, url: str) -> None:
        """Open no connection yet; the first command connects.

        Args:
            url: a URL of `specdec.settings.redis_url`.

        Raises:
            InvalidRequest: the URL has another form, or names TLS files that cannot be used (InvalidSetting).
        """
        self.num_failures = 0
        """Number of commands and scripts that failed after their retries."""
        try:
            parsed = parse_redis_url(url)
            self._servers: _Servers = _open(parsed, url)
            self.is_cluster = parsed.kind == CLUSTER
            """True if the keys are divided among the slots of a Redis Cluster."""
        except ValueError as error:
            raise InvalidRequest(f"the store URL {error}", field="redis_url") from error
        self._place = parsed.place

    async def run_script(self, name: str, keys: Sequence[str], args: Sequence[str | bytes | int] = ()) -> Any:
        """Run `scripts/<name>.lua` as one atomic step.

        Raises:
            Unavailable: STORE_UNAVAILABLE, after at most the time-outs and retries of `clients`.
        """
        try:
            (answer,) = await self._servers.run(name, [(keys, args)])
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error
        if isinstance(answer, Exception):
            raise self._unavailable(answer) from answer
        return answer

    async def run_scripts(self, name: str, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run a script for each (keys, args), sent together; the error of a call stands in place of its answer."""
        try:
            answers = await self._servers.run(name, calls)
        except (RedisError, OSError) as error:
            return [self._unavailable(error)] * len(calls)
        return [self._unavailable(answer) if isinstance(answer, Exception) else answer for answer in answers]

    async def run_command(self, *parts: str | bytes | int) -> Any:
        """Run one plain command, whose first argument is its only key. Raises Unavailable as `run_script` does."""
        try:
            return await self._servers.run_command(*parts)
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    async def ping(self) -> None:
        """Raise Unavailable if the store is not available."""
        try:
            await self._servers.ping()
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    async def check(self) -> None:
        """Ping the store before the first use.

        Raises:
            InvalidSetting: the URL, its user or the user's rights are wrong.
            Unavailable: the store is not available.
        """
        try:
            await self._servers.ping()
        except _WRONG_SETTINGS as error:
            raise InvalidSetting(f"--redis-url {self._place}: {_words(error)}", field="redis_url") from error
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    async def close(self) -> None:
        """Close every connection; running scripts fail. Idempotent."""
        await self._servers.close()

    def _unavailable(self, error: Exception) -> Unavailable:
        self.num_failures += 1
        if type(error) is ResponseError and _OF_VALUES.search(str(error)):
            return DamagedValue(f"the store at {self._place} holds a damaged value: {_words(error)}")
        return Unavailable(f"the store at {self._place} is not available: {_words(error)}", reason="STORE_UNAVAILABLE")


class DamagedValue(Unavailable):
    """A key holds what specdec never writes there: another type, or no number. The server works."""

    default_reason = "STORE_UNAVAILABLE"


#: Error of redis-py that has the number of the system's error, and not always its name.
_CONNECTING = re.compile(r"Error (\d{1,5}) connecting")
#: Errors of a server that come from the value of a key: its own, and those of a script that reads it.
_OF_VALUES = re.compile(r"WRONGTYPE|attempt to |bad argument|invalid value|not an integer|not a valid float")


def _open(url: RedisUrl, original: str) -> _Servers:
    return ClusterRunner(url) if url.kind == CLUSTER else _OneServer(open_client(url, original))


def _words(error: Exception) -> str:
    """Return what an error of Redis means, in one line."""
    if isinstance(error, OutOfMemoryError):
        return "its memory is full (maxmemory); nothing was written: raise maxmemory or lower --session-ttl-s"
    if isinstance(error, ReadOnlyError):
        return "it is a read-only replica, and writes need the primary"
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    found = _CONNECTING.match(text)
    reason = os.strerror(int(found[1])) if found else ""
    return text if reason in text else f"{reason} ({text})"
