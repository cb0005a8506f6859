"""The HTTP/1.1 connection of the gateway: a limit on the time for headers, and words for clients of the wrong kind.

uvicorn limits idle connections between requests, but not the time that the headers of a request take, so that a client
that sends a byte a minute would hold a connection for ever. A gRPC client begins with the preface of HTTP/2; it gets an
answer that says where gRPC is served.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_WORDS = (
    b"this port of specdec serves HTTP/1.1; gRPC is served by the coordinator, whose address specdec up prints as "
    b"grpc=HOST:PORT\n"
)
_TIMED_OUT = b"the headers of the request took too long\n"


def _plain_answer(status: bytes, words: bytes) -> bytes:
    return (
        b"HTTP/1.1 " + status + b"\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
        b"content-length: " + str(len(words)).encode() + b"\r\n\r\n" + words
    )


class LimitedHttp(HttpToolsProtocol):
    """One connection. `header_timeout_s` is set by `protocol_with`."""

    header_timeout_s = 10.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin = b""
        """First bytes of the connection, while they may still be the preface of HTTP/2."""
        self._is_known = False
        """Set once the connection is known to speak HTTP/1.1."""
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_known:
            super().data_received(data)
            return
        self._begin += data
        if _PREFACE.startswith(self._begin[: len(_PREFACE)]):
            if len(self._begin) >= len(_PREFACE):
                self._refuse(b"505 HTTP Version Not Supported", _WORDS)
            return
        self._is_known = True
        data, self._begin = self._begin, b""
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._start_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._header_timer = self.loop.call_later(self.header_timeout_s, self._time_out)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _time_out(self) -> None:
        self._refuse(b"408 Request Timeout", _TIMED_OUT)

    def _refuse(self, status: bytes, words: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(_plain_answer(status, words))
            self.transport.close()


def protocol_with(header_timeout_s: float) -> type[LimitedHttp]:
    """Return the class of connections whose headers must arrive within a time."""
    return type("LimitedHttp", (LimitedHttp,), {"header_timeout_s": header_timeout_s})
