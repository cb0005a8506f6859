"""Streamed completions over HTTP, event by event with their ids, as a client that can resume reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

_DONE = "[DONE]"


class HttpStream:
    """One stream of /v1/completions."""

    def __init__(self, response: httpx2.Response) -> None:
        self._lines = response.aiter_lines()
        self.texts: list[str] = []
        self.indexes: list[int] = []
        """Index in the id of each event with a choice: the number of output tokens up to it."""
        self.session_ids: set[str] = set()
        """Sessions that ids and events name; a whole stream has one."""
        self.finish_reason: str | None = None
        self.is_done = False

    @property
    def text(self) -> str:
        return "".join(self.texts)

    async def read_event(self) -> None:
        """Read the next event, or the end. Raises AssertionError for an error in the stream, and for an early end."""
        event_id = ""
        async for line in self._lines:
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            elif name == "data":
                self._take(event_id, value)
                return
        raise AssertionError(f"the stream ended without {_DONE} after {self.text!r}")

    async def read_all(self) -> None:
        """Read to the end."""
        while not self.is_done:
            await self.read_event()

    def _take(self, event_id: str, value: str) -> None:
        if value == _DONE:
            self.is_done = True
            return
        event = json.loads(value)
        assert "error" not in event, event
        session_id, _, index = event_id.rpartition(":")
        self.session_ids |= {session_id, event["session_id"]}
        self.indexes.append(int(index))
        (choice,) = event["choices"]
        self.texts.append(choice["text"])
        self.finish_reason = choice["finish_reason"] or self.finish_reason


@asynccontextmanager
async def open_stream(client: httpx2.AsyncClient, **fields: Any) -> AsyncIterator[HttpStream]:
    """Begin a streamed completion; leaving the block before its end closes the connection."""
    accept = {"accept": "text/event-stream"}
    async with client.stream("POST", "/v1/completions", json={**fields, "stream": True}, headers=accept) as response:
        assert response.status_code == 200, await response.aread()
        yield HttpStream(response)
