"""ASGI layers around the routes: measuring, API keys, and limits on bodies.

They are plain ASGI: a stream passes them without a task or a queue of its own. A request that passes goes to a route,
such as `gateway.routes.chat`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.auth import ApiKeys
from gateway.context import ACCESS, wants_event_ids
from gateway.http_errors import error_response
from gateway.metrics import GatewayMetrics
from gateway.sse import CLIENT_GONE, ClientGone
from specdec.access.grants import Access
from specdec.access.refusals import RefusalLog
from specdec.errors import Forbidden, InvalidRequest, SpecdecError, Unauthenticated

#: Paths that need a key where there are keys.
_GUARDED = ("/v1/", "/tokenize", "/detokenize")
_BEARER = "bearer "
_TOO_LARGE = 413
_TIMED_OUT = 408
_BAD = 400
_FAILED = 500
#: The HTTP parser leaves out the body of a request that asks for another protocol, as Java's client does by default.
_NO_UPGRADE = (
    "the body of a request with the header Upgrade is not read: send it without this header; a client that asks for "
    "HTTP/2 must be set to HTTP/1.1"
)
#: Multiple of the limit up to which a body that is too large is read and dropped.
_MAX_DROPPED = 8


class Measured:
    """Counts and times every request."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status = time.monotonic(), CLIENT_GONE

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.request_began()
        try:
            await self._app(scope, receive, noted)
        except ClientGone:
            self._metrics.observe_disconnect()
        except Exception:  # becomes an answer in the framework's outermost layer
            status = _FAILED
            raise
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.request_ended(route, status, time.monotonic() - began_s)


class Authenticated:
    """Finds the caller of a request by its API key, and applies the key's limits."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app, self._keys = app, keys
        self._refusals = RefusalLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_GUARDED):
            await self._app(scope, receive, send)
            return
        try:
            access = self._access(scope)
            scope.setdefault("state", {})[ACCESS] = access
            if scope["method"] != "POST" and not _is_resumption(scope):
                await self._app(scope, receive, send)
                return
            with self._keys.admitted(access):
                await self._app(scope, receive, send)
        except SpecdecError as error:  # those of the routes have become answers by now
            await error_response(error, scope["path"])(scope, receive, send)

    def _access(self, scope: Scope) -> Access:
        """Return the access of a request's caller. Raises as `ApiKeys.access`."""
        try:
            return self._keys.access(_key_of(Headers(scope=scope)))
        except (Unauthenticated, Forbidden) as error:
            host, port = scope.get("client") or ("", 0)
            self._refusals.note(f"{host}:{port}", error)
            raise


class LimitedBody:
    """Refuses bodies that are too large, or that arrive too slowly."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float) -> None:
        self._app, self._max_bytes, self._timeout_s = app, max_bytes, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(receive, _announced_bytes(scope))
        except TimeoutError:
            message = f"the request body did not arrive within {self._timeout_s:g} s"
            await self._refuse(scope, receive, send, InvalidRequest(message), _TIMED_OUT)
        except InvalidRequest as error:
            await self._refuse(scope, receive, send, error, _TOO_LARGE)
        else:
            if not body["body"] and "upgrade" in Headers(scope=scope) and _announced_bytes(scope):
                await self._refuse(scope, receive, send, InvalidRequest(_NO_UPGRADE), _BAD)
                return
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive, announced_bytes: int) -> Message:
        """Return the whole body as one message.

        A body that is somewhat too large is read to its end and dropped, because a client that is still sending would
        otherwise see a broken connection in place of the answer.

        Raises:
            InvalidRequest: the body is too large.
            TimeoutError: it takes too long.
            ClientGone: the client went away.
        """
        if announced_bytes > _MAX_DROPPED * self._max_bytes:
            raise self._too_large()
        parts, num_bytes = [], 0
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
                    return {"type": "http.request", "body": b"".join(parts), "more_body": False}

    def _too_large(self) -> InvalidRequest:
        return InvalidRequest(f"the request body must have at most {self._max_bytes} bytes", reason="REQUEST_TOO_LARGE")

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, error: InvalidRequest, status: int) -> None:
        """Answer without reading the rest of the body, and so close the connection."""
        response = error_response(error, scope["path"], status=status, headers={"connection": "close"})
        await response(scope, receive, send)


def _replay(body: Message, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """Return a `receive` that gives the body once and then what comes after it, which is a disconnect."""
    pending = [body]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


def _announced_bytes(scope: Scope) -> int:
    announced = Headers(scope=scope).get("content-length", "")
    return int(announced) if announced.isascii() and announced.isdecimal() else 0


def _is_resumption(scope: Scope) -> bool:
    """Return whether a request without a body continues a generation, which counts as one of the caller's."""
    return scope["method"] == "GET" and wants_event_ids(Request(scope))


def _key_of(headers: Headers) -> str | None:
    authorization = headers.get("authorization", "")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return headers.get("x-api-key")
