"""A minimal HTTP client for loopback: one JSON request, and its server-sent events as they arrive.

It has as little code as possible between the socket and the caller, because it shares the cores with the servers that
it measures. One connection serves one request. Called by `bench.systems.http_servers`.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

_LIMIT_BYTES = 1 << 24  # longest line: the last event of some servers repeats the whole prompt
_END = "[DONE]"


class HttpFailure(Exception):
    """The server answered with another status than 200; the message has the status and the beginning of the body."""


async def get_status(port: int, path: str) -> int:
    """Return the status of a GET request.

    Raises:
        OSError: no server listens on the port, or it closed the connection.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_head("GET", path))
        status, _ = await _read_head(reader)
        return status
    finally:
        writer.close()


async def stream_events(port: int, path: str, body: Any) -> AsyncIterator[Any]:
    """Send a JSON body by POST and yield the JSON value of each server-sent event.

    Raises:
        HttpFailure: the status is not 200.
        OSError: the connection fails.
    """
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LIMIT_BYTES)
    try:
        writer.write(_head("POST", path, len(content)) + content)
        status, is_chunked = await _read_head(reader)
        blocks = _chunks(reader) if is_chunked else _blocks(reader)
        if status != 200:
            reason = b"".join([block async for block in blocks])
            raise HttpFailure(f"{path} answered {status}: {reason[:500].decode(errors='replace')}")
        async for line in _lines(blocks):
            name, _, value = line.partition(": ")
            if name == "data":
                if value == _END:
                    return
                yield json.loads(value)
    finally:
        writer.close()


def _head(method: str, path: str, num_bytes: int = 0) -> bytes:
    lines = (f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", "Content-Type: application/json")
    return "\r\n".join([*lines, f"Content-Length: {num_bytes}", "", ""]).encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Return the status and whether the body is chunked."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status_line, *headers = head.split("\r\n")
    is_chunked = any(line.startswith("transfer-encoding:") and "chunked" in line for line in headers)
    return int(status_line.split()[1]), is_chunked


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while num_bytes := int((await reader.readline()).partition(b";")[0], 16):
        yield (await reader.readexactly(num_bytes + 2))[:-2]


async def _blocks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while block := await reader.read(1 << 16):
        yield block


async def _lines(blocks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    rest = b""
    async for block in blocks:
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r").decode()
    if rest:
        yield rest.decode()
