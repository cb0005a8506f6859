"""The HTTP/1.1 connection of the gateway: limits on time and size of headers, and words for clients of the wrong kind.

uvicorn limits idle connections between requests, but not the time that the headers of a request take, so that a client
that sends a byte a minute would hold a connection for ever, nor their size, so that one request could fill the memory.
A gRPC client begins with the preface of HTTP/2; it gets an answer that says where gRPC is served. A stream to a client
of HTTP/1.0, which knows no chunks, ends with its connection.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.http_errors import error_object
from specdec.contract.errors import InvalidRequest

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_WORDS = (
    "this port of specdec serves HTTP/1.1; gRPC is served by the coordinator, whose address specdec up prints as "
    "grpc=HOST:PORT"
)
_TIMED_OUT = "the headers of the request took too long"
_MALFORMED = "the request is not valid HTTP/1.1"
#: Size that request line and headers may have, and at most the size of one more read from the socket.
_MAX_HEADER_BYTES = 1 << 16


def _answer(status: str, words: str) -> bytes:
    """Return a whole answer with OpenAI's error object, for a connection that has no request yet."""
    body = json.dumps(error_object(InvalidRequest(words), int(status[:3])))
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
    return f"{head}\r\n\r\n{body}".encode("ascii")


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
        """Set while headers are awaited."""
        self._num_header_bytes = 0
        """Bytes of the reads that ended within the headers of the current request."""
        self._is_between_requests = False
        """Set from the end of a request to the start of the next one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_known:
            self._parse(data)
            return
        self._begin += data
        if _PREFACE.startswith(self._begin[: len(_PREFACE)]):
            if len(self._begin) >= len(_PREFACE):
                self._refuse("505 HTTP Version Not Supported", _WORDS)
            return
        self._is_known = True
        data, self._begin = self._begin, b""
        self._parse(data)

    def on_message_complete(self) -> None:
        self._is_between_requests = True
        super().on_message_complete()

    def on_message_begin(self) -> None:
        self._is_between_requests = False
        self._start_timer()
        super().on_message_begin()

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", _MALFORMED)

    def on_headers_complete(self) -> None:
        self._num_header_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            _end_with_connection(self.cycle)

    def _start_timer(self) -> None:
        self._stop_timer()
        self._header_timer = self.loop.call_later(self.header_timeout_s, self._time_out)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_between_requests and self._header_timer is None and not self._is_answering():
            self._start_timer()  # uvicorn's timer of idle connections ends with any byte, such as a blank line
        if self._header_timer is not None:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > _MAX_HEADER_BYTES:
                words = f"the headers of the request must have at most {_MAX_HEADER_BYTES} bytes"
                self._refuse("431 Request Header Fields Too Large", words)

    def _time_out(self) -> None:
        if self._is_answering():  # the next request's time counts from the end of this answer
            self._start_timer()
        else:
            self._refuse("408 Request Timeout", _TIMED_OUT)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _has_begun_to_answer(self) -> bool:
        return self._is_answering() and bool(self.pipeline or self.cycle.response_started)

    def _refuse(self, status: str, words: str) -> None:
        """Close the connection with an error, which would garble an answer that is under way and is left out then."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        if not self._has_begun_to_answer():
            self.transport.write(_answer(status, words))
        self.transport.close()


def _end_with_connection(cycle: RequestResponseCycle) -> None:
    """Send an answer of unknown length without chunks. uvicorn closes the connection of such a client after it."""
    send, is_stream = cycle.send, False

    async def send_unchunked(message: Any) -> None:
        nonlocal is_stream
        if message["type"] == "http.response.start":
            is_stream = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = False if is_stream else None
        elif is_stream:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unchunked  # type: ignore[method-assign]


def protocol_with(header_timeout_s: float) -> type[LimitedHttp]:
    """Return the class of connections whose headers must arrive within a time."""
    return type("LimitedHttp", (LimitedHttp,), {"header_timeout_s": header_timeout_s})
