"""Server-sent events: the encoding, and an answer that streams them until they end or the client goes away.

`EventStream` is what routes such as `gateway.routes.chat` return for a stream. It waits for the first event before it
sends a status, so that an error before the first token has a status of its own. After `keep_alive_s` without an event
it sends a comment, at first with the status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.contract.errors import Internal, SpecdecError

DONE = b"data: [DONE]\n\n"
#: Status in metrics for a client that went away before its answer began; nothing is sent.
CLIENT_GONE = 499

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
#: Ends of lines in Unicode, at which some readers of lines divide an event. JSON escapes the others.
_LINE_ENDS = str.maketrans({"\x85": r"\u0085", "\u2028": r"\u2028", "\u2029": r"\u2029"})
_KEEP_ALIVE = b": keep-alive\n\n"

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)


def encode_event(data: str, *, name: str = "", event_id: str = "") -> bytes:
    """Return one event. `data` must be JSON in a single line, or without the characters that end one."""
    if not data.isascii():
        data = data.translate(_LINE_ENDS)
    lines = f"event: {name}\n" if name else ""
    lines += f"id: {event_id}\n" if event_id else ""
    return f"{lines}data: {data}\n\n".encode("utf-8", "backslashreplace")


class EventStream(Response):
    """An answer of server-sent events."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        encode_error: Callable[[SpecdecError], bytes],
        keep_alive_s: float,
        on_disconnect: Callable[[], None],
    ) -> None:
        """
        Args:
            events: encoded events. It is closed at the end, and earlier if the client goes away.
            encode_error: returns what the stream ends with after an error.
            keep_alive_s: seconds of silence after which a comment is sent.
            on_disconnect: called if the client goes away before the end.
        """
        self._events, self._encode_error = events, encode_error
        self._keep_alive_s, self._on_disconnect = keep_alive_s, on_disconnect
        self._has_begun = False
        self._sent_s = 0.0
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events.

        Raises:
            SpecdecError: before the first event; nothing has been sent then.
        """
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(until_disconnect(receive))
        waking = asyncio.create_task(self._keep_alive(send))
        tasks = {sending, leaving, waking}
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if sending.cancelled():
            self._on_disconnect()
        else:
            sending.result()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    await self._send(send, event)
            except SpecdecError as error:
                await self._end_with(send, error)
            except Exception:
                _log.exception("a stream failed")
                await self._end_with(send, Internal("the stream failed; the gateway's log has the cause"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _end_with(self, send: Send, error: SpecdecError) -> None:
        """Send the error as the last event. Raises it if nothing has been sent, so that it becomes the answer."""
        if not self._has_begun:
            raise error
        await self._send(send, self._encode_error(error))

    async def _send(self, send: Send, body: bytes) -> None:
        self._sent_s = asyncio.get_running_loop().time()
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time()
        while True:
            await asyncio.sleep(max(0.0, self._sent_s + self._keep_alive_s - loop.time()))
            if loop.time() >= self._sent_s + self._keep_alive_s:
                await self._send(send, _KEEP_ALIVE)


class ClientGone(Exception):
    """The client has closed the connection, so there is no answer to send."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return the result of `work`, which is cancelled if the client goes away. The body must have been read.

    Raises:
        ClientGone: the client went away first.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(until_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})
    if working.cancelled():
        raise ClientGone
    return working.result()


async def until_disconnect(receive: Receive) -> None:
    """Return once the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
