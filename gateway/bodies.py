"""Request bodies: an ASGI layer that reads and decodes them within limits, and routes that read their JSON.

The layer stands between `gateway.middleware` and the routes, which get a body that is whole and not compressed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http_errors import error_response
from gateway.sse import ClientGone
from specdec.contract.errors import InvalidRequest

_BAD = 400
_TIMED_OUT = 408
_TOO_LARGE = 413
_UNKNOWN_ENCODING = 415
#: The HTTP parser leaves out the body of a request that asks for another protocol, as Java's client does by default.
_NO_UPGRADE = (
    "the body of a request with the header Upgrade is not read: send it without this header; a client that asks for "
    "HTTP/2 must be set to HTTP/1.1"
)
#: Multiple of the limit up to which a body that is too large is read and dropped.
_MAX_DROPPED = 8
_GZIP = (["gzip"], ["x-gzip"])
#: `zlib` reads the header and the checksum of gzip.
_GZIP_WINDOW_BITS = 31
#: Limit on the parts of a gzip body, which may be empty and then cost time and no bytes.
_MAX_GZIP_PARTS = 64
#: Limit on objects and lists in each other. Python reads and writes about 900.
MAX_DEPTH = 640


class LimitedBody:
    """Reads bodies, and refuses those that are too large, that arrive too slowly, or whose encoding is unknown."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float) -> None:
        self._app, self._max_bytes, self._timeout_s = app, max_bytes, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = self._decoded(await self._read(receive, _announced_bytes(scope)), scope)
        except _Refused as refused:
            headers = {"connection": "close", **refused.headers}
            answer = error_response(refused.error, scope["path"], status=refused.status, headers=headers)
            await answer(scope, receive, send)
        else:
            await self._app(scope, _replay({"type": "http.request", "body": body, "more_body": False}, receive), send)

    async def _read(self, receive: Receive, announced_bytes: int) -> bytes:
        """Return the whole body.

        A body that is somewhat too large is read to its end and dropped, because a client that is still sending would
        otherwise see a broken connection in place of the answer.

        Raises:
            _Refused: the body is too large, or takes too long.
            ClientGone: the client went away.
        """
        if announced_bytes > _MAX_DROPPED * self._max_bytes:
            raise self._too_large()
        parts, num_bytes = [], 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ClientGone
                    num_bytes += len(message.get("body", b""))
                    if num_bytes <= self._max_bytes:
                        parts.append(message.get("body", b""))
                    elif not message.get("more_body") or num_bytes > _MAX_DROPPED * self._max_bytes:
                        raise self._too_large()
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            error = InvalidRequest(f"the request body did not arrive within {self._timeout_s:g} s")
            raise _Refused(error, _TIMED_OUT) from None

    def _decoded(self, body: bytes, scope: Scope) -> bytes:
        """Return the body without its content encoding. Raises _Refused."""
        headers = Headers(scope=scope)
        if not body:
            if "upgrade" in headers and _announced_bytes(scope):
                raise _Refused(InvalidRequest(_NO_UPGRADE))
            return body
        listed = ",".join(headers.getlist("content-encoding")).lower().split(",")
        codings = [coding for each in listed if (coding := each.strip()) not in ("", "identity")]
        if not codings:
            return body
        if codings not in _GZIP:
            raise _wrong_encoding(
                f"the request body must be sent as it is or with gzip, got {', '.join(codings)[:64]!r}",
                _UNKNOWN_ENCODING,
                headers={"accept-encoding": "gzip"},
            )
        return self._gunzipped(body)

    def _gunzipped(self, body: bytes) -> bytes:
        """Return the content of a gzip body, of which at most one byte more than the limit is unpacked."""
        parts, room = [], self._max_bytes + 1
        for _ in range(_MAX_GZIP_PARTS):
            part = zlib.decompressobj(_GZIP_WINDOW_BITS)
            try:
                parts.append(part.decompress(body, room))
            except zlib.error as error:
                raise _wrong_encoding(f"the request body is not valid gzip: {error}") from None
            room -= len(parts[-1])
            if room == 0:
                raise self._too_large()
            if not part.eof:
                raise _wrong_encoding("the request body is not valid gzip: it ends too early")
            body = part.unused_data
            if not body:
                return b"".join(parts)
        raise _wrong_encoding(f"the request body must have at most {_MAX_GZIP_PARTS} gzip parts")

    def _too_large(self) -> _Refused:
        error = InvalidRequest(
            f"the request body must have at most {self._max_bytes} bytes", reason="REQUEST_TOO_LARGE"
        )
        return _Refused(error, _TOO_LARGE)


class _Refused(Exception):
    """A body that is not read any further, so that its connection is closed."""

    def __init__(self, error: InvalidRequest, status: int = _BAD, headers: Mapping[str, str] | None = None) -> None:
        self.error, self.status, self.headers = error, status, headers or {}


def _wrong_encoding(message: str, status: int = _BAD, *, headers: Mapping[str, str] | None = None) -> _Refused:
    return _Refused(InvalidRequest(f"content-encoding: {message}", field="content-encoding"), status, headers)


class JsonRoute(APIRoute):
    """A route that says what makes a body unreadable."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


class _JsonRequest(Request):
    async def json(self) -> Any:
        """Return the body's value. Raises JSONDecodeError, and HTTPException for other faults."""
        if not hasattr(self, "_json"):
            self._json = _read_json(await self.body())
        return self._json


def _read_json(body: bytes) -> Any:
    try:
        value = json.loads(body.decode(json.detect_encoding(body)))
    except UnicodeDecodeError as error:
        raise HTTPException(_BAD, f"the request body is not valid UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # Python reads no longer integers, because the time rises with the square of their length
        max_digits = sys.get_int_max_str_digits()
        message = f"the request body has an integer of too many digits: at most {max_digits} are read"
        raise HTTPException(_BAD, message) from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_too_deep(value):
        raise _too_deep()
    return value


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in inner if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _too_deep() -> HTTPException:
    return HTTPException(_BAD, f"the request body is nested too deeply: at most {MAX_DEPTH} levels are read")


def _replay(body: Message, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """Return a `receive` that gives the body once and then what comes after it, which is a disconnect."""
    pending = [body]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


def _announced_bytes(scope: Scope) -> int:
    announced = Headers(scope=scope).get("content-length", "")
    return int(announced) if announced.isascii() and announced.isdecimal() else 0
