"""An answer of server-sent events: its status, its errors, its comments, and its end when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gateway.sse import ClientGone, EventStream, while_connected
from specdec.contract.errors import Unavailable


class Client:
    """The other end of an ASGI connection."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.has_left = asyncio.Event()
        self.got = asyncio.Event()
        """Set by every message."""

    async def receive(self) -> dict[str, Any]:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        self.got.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


def stream_of(events: AsyncGenerator[bytes, None], *, keep_alive_s: float = 60.0) -> tuple[EventStream, list[None]]:
    """The answer, and a list that gets an entry when the client goes away."""
    gone: list[None] = []
    answer = EventStream(
        events,
        encode_error=lambda error: f"error {error.reason}".encode(),
        keep_alive_s=keep_alive_s,
        on_disconnect=lambda: gone.append(None),
    )
    return answer, gone


async def test_an_error_before_the_first_event_is_raised_and_nothing_is_sent() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        raise Unavailable("no target")
        yield b""

    client = Client()
    with pytest.raises(Unavailable):
        await stream_of(events())[0]({}, client.receive, client.send)
    assert client.messages == []


async def test_an_error_after_the_first_event_is_the_stream_s_last_event() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"one "
        raise Unavailable("no target")

    client = Client()
    await stream_of(events())[0]({}, client.receive, client.send)
    assert client.body == b"one error REPLICA_UNAVAILABLE"
    assert client.messages[0]["status"] == 200
    assert client.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_a_fault_of_the_gateway_after_the_first_event_ends_the_stream_without_its_details() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"one "
        raise KeyError("secret")

    client = Client()
    await stream_of(events())[0]({}, client.receive, client.send)
    assert client.body == b"one error INTERNAL"


async def test_a_silent_stream_gets_comments_and_the_first_one_brings_the_status() -> None:
    go_on = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        await go_on.wait()
        yield b"data: x\n\n"

    client = Client()
    answering = asyncio.create_task(stream_of(events(), keep_alive_s=0.01)[0]({}, client.receive, client.send))
    while client.body.count(b": keep-alive\n\n") < 2:
        client.got.clear()
        await client.got.wait()
    assert client.messages[0]["status"] == 200
    go_on.set()
    await answering
    assert client.body.endswith(b"data: x\n\n")


async def test_a_client_that_leaves_closes_the_source_of_events() -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"one"
            await asyncio.Event().wait()
        finally:
            closed.set()

    client = Client()
    answer, gone = stream_of(events())
    answering = asyncio.create_task(answer({}, client.receive, client.send))
    await client.got.wait()
    client.has_left.set()
    await answering
    assert closed.is_set()
    assert gone == [None]


async def test_work_for_a_client_that_leaves_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    client = Client()
    client.has_left.set()
    with pytest.raises(ClientGone):
        await while_connected(client.receive, work())
    assert cancelled.is_set()
