"""Runs Lua scripts on one Redis server, in pipelines. `connection` and `redis_cluster` use it.

Scripts that start in one turn of the event loop travel in one pipeline; each stays an atomic step of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from redis.exceptions import ConnectionError, NoScriptError, ReadOnlyError, RedisError, ResponseError, TimeoutError

from specdec.state.clients import cancellation_kept

#: Limit of scripts in one pipeline; its last reply waits for all of them.
MAX_BATCH = 256

#: Line by which a script includes the functions of another one.
_INCLUDES = re.compile(r"^-- INCLUDES (\w+)$", re.MULTILINE)

#: Keys and arguments of one script.
ScriptCall = tuple[Sequence[str], Sequence[str | bytes | int]]


@dataclass(slots=True)
class _Request:
    """A script with its calls for any number of sessions."""

    name: str
    calls: Sequence[ScriptCall]
    answers: asyncio.Future[list[Any]]


class ScriptRunner:
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
            if errors := [answer for answer in answers if isinstance(answer, ResponseError)]:
                answers = await self._recover(commands, answers, errors)
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

    async def _recover(
        self, commands: Sequence[tuple[str, ScriptCall]], answers: list[Any], errors: Sequence[ResponseError]
    ) -> list[Any]:
        """Return the answers after an attempt to remove the reason of their errors."""
        if any(isinstance(error, ReadOnlyError) for error in errors):
            # This server was the primary and is a replica now. The next command looks anew for the primary.
            await self._client.connection_pool.disconnect()
        unknown = [command for command, answer in zip(commands, answers, strict=True) if _is_unknown(answer)]
        if not unknown:
            return answers
        # A server that has just started knows no script; those that did not run are sent again.
        await self._load({name for name, _ in unknown})
        answered = iter(await self._run_pipeline(unknown))
        return [next(answered) if _is_unknown(answer) else answer for answer in answers]

    async def _load(self, names: set[str]) -> None:
        for name in names:
            await self._client.script_load(script_text(name))
            self._loaded.add(name)

    async def _run_pipeline(self, commands: Sequence[tuple[str, ScriptCall]]) -> list[Any]:
        """Return an answer for each script: its result, or its exception."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for name, (keys, args) in commands:
                pipeline.execute_command("EVALSHA", _script_sha(name), len(keys), *keys, *args)
            with cancellation_kept():
                answers: list[Any] = await pipeline.execute(raise_on_error=False)
            return answers


def _is_unknown(answer: Any) -> bool:
    return isinstance(answer, NoScriptError)


def _fail(requests: Iterable[_Request], error: Exception) -> None:
    for request in requests:
        if not request.answers.done():
            request.answers.set_exception(error)


@cache
def script_text(name: str) -> str:
    """Return the text of a script in `scripts/`, with the functions of the script that it includes."""
    text = (resources.files("specdec.state") / "scripts" / f"{name}.lua").read_text(encoding="utf-8")
    return _INCLUDES.sub(lambda included: script_text(included[1]), text)


@cache
def _script_sha(name: str) -> str:
    """Return Redis's name of a script."""
    return hashlib.sha1(script_text(name).encode(), usedforsecurity=False).hexdigest()
