"""A Redis connection pool that runs Lua scripts and maps Redis's failures to the error tree.

Scripts that start in one turn of the event loop travel in one pipeline; each stays an atomic step of its own. A
`memory://` URL is an in-process `fakeredis`, one shared instance per process and name. Used by `redis_store`,
`prefix_directory` and `promotions`; the cold tier has connections of its own (`kv_link`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, NoScriptError, RedisError, TimeoutError

from specdec.errors import InvalidRequest, Unavailable, Unsupported

SCHEMES = ("redis", "rediss", "unix", "memory")

#: Time limits of a connection attempt, of a reply, and of the wait for a free connection.
CONNECT_TIMEOUT_S = 2.0
REPLY_TIMEOUT_S = 2.0
POOL_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
#: Limit of scripts in one pipeline; its last reply waits for all of them.
MAX_BATCH = 256
#: Every script is idempotent, so it is sent again when its reply is lost, at most this many times.
NUM_RETRIES = 3
RETRY_BASE_S = 0.02
RETRY_CAP_S = 0.3

#: Redis version that the scripts are written for; the in-memory store emulates it.
REDIS_VERSION = (7, 0)


#: Keys and arguments of one script.
ScriptCall = tuple[Sequence[str], Sequence[str | bytes | int]]


class RedisConnection:
    """Runs specdec's scripts and a few plain commands. Safe for any number of tasks of one event loop."""

    def __init__(self, url: str) -> None:
        """Open no connection yet; the first command connects.

        Args:
            url: redis://, rediss://, unix:// or memory://NAME (the name is optional).

        Raises:
            InvalidRequest: the URL has another form.
        """
        self.num_failures = 0
        """Number of commands and scripts that failed after their retries."""
        self._place = describe_url(url)
        self._client: Any = _open_client(url)
        self._scripts = _ScriptRunner(self._client)

    async def run_script(self, name: str, keys: Sequence[str], args: Sequence[str | bytes | int] = ()) -> Any:
        """Run `scripts/<name>.lua` as one atomic step.

        Raises:
            Unavailable: STORE_UNAVAILABLE, after at most this module's timeouts and retries.
        """
        try:
            (answer,) = await self._scripts.run(name, [(keys, args)])
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error
        if isinstance(answer, Exception):
            raise self._unavailable(answer) from answer
        return answer

    async def run_scripts(self, name: str, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run a script for each (keys, args), sent together; the error of a call stands in place of its answer."""
        try:
            answers = await self._scripts.run(name, calls)
        except (RedisError, OSError) as error:
            return [self._unavailable(error)] * len(calls)
        return [self._unavailable(answer) if isinstance(answer, Exception) else answer for answer in answers]

    async def run_command(self, *parts: str | bytes | int) -> Any:
        """Run one plain command. Raises Unavailable as `run_script` does."""
        try:
            return await self._client.execute_command(*parts)
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    async def close(self) -> None:
        """Close every connection; running scripts fail. Idempotent."""
        await self._scripts.close()
        await self._client.aclose()

    def _unavailable(self, error: Exception) -> Unavailable:
        self.num_failures += 1
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        return Unavailable(f"the store at {self._place} is not available: {reason}", reason="STORE_UNAVAILABLE")


@dataclass(slots=True)
class _Request:
    """A script with its calls for any number of sessions."""

    name: str
    calls: Sequence[ScriptCall]
    answers: asyncio.Future[list[Any]]


class _ScriptRunner:
    """Sends scripts in pipelines, one pipeline at a time; scripts that arrive meanwhile go with the next one."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._waiting: deque[_Request] = deque()
        self._loaded: set[str] = set()
        """Scripts that were loaded into the server; a server that has restarted since answers NOSCRIPT."""
        self._sender: asyncio.Task[None] | None = None

    async def run(self, name: str, calls: Sequence[ScriptCall]) -> list[Any]:
        """Return the script's answer for each call, or the exception of that call.

        Cancelling drops calls that were not sent yet. If the server cannot be reached, redis-py's error is raised.
        """
        request = _Request(name, calls, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_all(), name="store")
        return await request.answers

    async def close(self) -> None:
        """Fail scripts that wait or run."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait([self._sender])
            self._end([])  # for a task that never ran

    async def _send_all(self) -> None:
        batch: list[_Request] = []
        try:
            while batch := self._take():
                await self._send(batch)
        finally:
            self._end(batch)

    def _end(self, batch: list[_Request]) -> None:
        self._sender = None
        _fail([*batch, *self._waiting], ConnectionError("the connection was closed"))
        self._waiting.clear()

    def _take(self) -> list[_Request]:
        batch: list[_Request] = []
        size = 0
        while self._waiting and (not batch or size + len(self._waiting[0].calls) <= MAX_BATCH):
            request = self._waiting.popleft()
            if not request.answers.done():
                batch.append(request)
                size += len(request.calls)
        return batch

    async def _send(self, batch: list[_Request]) -> None:
        commands = [(request.name, call) for request in batch for call in request.calls]
        try:
            # Loaded first, because an unknown script costs the pipeline a second round trip.
            await self._load({request.name for request in batch} - self._loaded)
            answers = await self._run_pipeline(commands)
            if unknown := [command for command, answer in zip(commands, answers, strict=True) if _is_unknown(answer)]:
                # A server that has just started knows no script; those that did not run are sent again.
                await self._load({name for name, _ in unknown})
                answered = iter(await self._run_pipeline(unknown))
                answers = [next(answered) if _is_unknown(answer) else answer for answer in answers]
        except (RedisError, OSError) as error:
            self._loaded.clear()
            _fail(batch, error)
            if isinstance(error, ConnectionError | TimeoutError | OSError):
                # Requests that arrived meanwhile would wait for the same time-out again.
                _fail(self._waiting, error)
                self._waiting.clear()
            return
        start = 0
        for request in batch:
            end = start + len(request.calls)
            if not request.answers.done():
                request.answers.set_result(answers[start:end])
            start = end

    async def _load(self, names: set[str]) -> None:
        for name in names:
            await self._client.script_load(_script_text(name))
            self._loaded.add(name)

    async def _run_pipeline(self, commands: Sequence[tuple[str, ScriptCall]]) -> list[Any]:
        """Return an answer for each script: its result, or its exception."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for name, (keys, args) in commands:
                pipeline.execute_command("EVALSHA", _script_sha(name), len(keys), *keys, *args)
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
            return answers


def _is_unknown(answer: Any) -> bool:
    return isinstance(answer, NoScriptError)


def _fail(requests: Iterable[_Request], error: Exception) -> None:
    for request in requests:
        if not request.answers.done():
            request.answers.set_exception(error)


def _open_client(url: str) -> Any:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise InvalidRequest(
            f"store URL {describe_url(url)!r} must begin with redis://, rediss://, unix:// or memory://"
        )
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
            # The same protocol for every supported version of redis-py.
            protocol=2,
        )
    except ValueError as error:
        raise InvalidRequest(f"store URL {describe_url(url)!r} is malformed: {error}") from error
    return Redis.from_pool(pool)


def _open_in_memory(name: str) -> Any:
    # Imported here, because a service on a real Redis does not need it.
    require_fakeredis("a memory:// store", "give --redis-url redis://HOST:PORT")
    from fakeredis import FakeAsyncRedis

    return FakeAsyncRedis(server=_memory_server(name), protocol=2)


def require_fakeredis(store: str, instead: str) -> None:
    """Raise Unsupported if the package of the embedded stores is not installed.

    Args:
        store: the store that needs it, for the message.
        instead: the alternative to an installation, for the message.
    """
    if find_spec("fakeredis") is None:
        raise Unsupported(
            f"{store} needs the package fakeredis, which is not installed: {instead}, or run pip install "
            "'specdec[embedded]'",
            field="redis_url",
        )


@cache
def _memory_server(name: str) -> Any:
    from fakeredis import FakeServer

    return FakeServer(version=REDIS_VERSION)


@cache
def _script_text(name: str) -> str:
    return (resources.files("specdec.state") / "scripts" / f"{name}.lua").read_text(encoding="utf-8")


@cache
def _script_sha(name: str) -> str:
    """Return Redis's name of a script."""
    return hashlib.sha1(_script_text(name).encode(), usedforsecurity=False).hexdigest()


def describe_url(url: str) -> str:
    """Return the URL without user and password, which must not reach logs or clients."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
