"""A proxy that passes HTTP/2 on unchanged, and resets streams in the middle with the codes that a test chooses.

It reads frame headers only. After a reset it still passes the stream's frames on: they belong to the connection's flow
control and header compression, and both ends ignore them otherwise. Used by tests of clients and of the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from types import TracebackType
from typing import Self

#: Every error code of RFC 9113, section 7.
HTTP2_CODES = {
    0x0: "NO_ERROR",
    0x1: "PROTOCOL_ERROR",
    0x2: "INTERNAL_ERROR",
    0x3: "FLOW_CONTROL_ERROR",
    0x4: "SETTINGS_TIMEOUT",
    0x5: "STREAM_CLOSED",
    0x6: "FRAME_SIZE_ERROR",
    0x7: "REFUSED_STREAM",
    0x8: "CANCEL",
    0x9: "COMPRESSION_ERROR",
    0xA: "CONNECT_ERROR",
    0xB: "ENHANCE_YOUR_CALM",
    0xC: "INADEQUATE_SECURITY",
    0xD: "HTTP_1_1_REQUIRED",
}

_CANCEL = 0x8
_PREFACE_BYTES, _HEAD_BYTES = 24, 9
_DATA, _RST_STREAM = 0x0, 0x3


class ResettingProxy:
    """A TCP listener in front of one server that speaks HTTP/2 without TLS."""

    def __init__(self, upstream: str, *, after_frames: int = 3) -> None:
        """
        Args:
            upstream: HOST:PORT of the server.
            after_frames: number of frames with data from the server after which a stream is reset. The answer of a
                call that is no stream has one.
        """
        self._upstream = upstream
        self._after_frames = after_frames
        self._code: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""
        """HOST:PORT that clients connect to."""
        self.num_resets = 0

    def reset_with(self, code: int | None) -> None:
        """Reset streams with this code from now on; None: none."""
        self._code = code
        self.num_resets = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._upstream.rpartition(":")
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        pumps = [
            asyncio.create_task(self._pass_requests(reader, upstream_writer)),
            asyncio.create_task(self._pass_answers(upstream_reader, writer, upstream_writer)),
        ]
        self._tasks.update(pumps)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            writer.close()
            upstream_writer.close()
            self._tasks.difference_update(pumps)

    async def _pass_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            writer.write(await reader.readexactly(_PREFACE_BYTES))
            while True:
                writer.write(await _read_frame(reader))

    async def _pass_answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream: asyncio.StreamWriter
    ) -> None:
        num_frames: Counter[int] = Counter()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                frame = await _read_frame(reader)
                writer.write(frame)
                stream = int.from_bytes(frame[5:_HEAD_BYTES], "big")
                if frame[3] == _DATA and len(frame) > _HEAD_BYTES:
                    num_frames[stream] += 1
                    if self._code is not None and num_frames[stream] == self._after_frames:
                        writer.write(_reset(stream, self._code))
                        upstream.write(_reset(stream, _CANCEL))
                        self.num_resets += 1


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(_HEAD_BYTES)
    return head + await reader.readexactly(int.from_bytes(head[:3], "big"))


def _reset(stream: int, code: int) -> bytes:
    body = code.to_bytes(4, "big")
    return len(body).to_bytes(3, "big") + bytes([_RST_STREAM, 0]) + stream.to_bytes(4, "big") + body
