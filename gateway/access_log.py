"""The ASGI layer that gives every request an id and writes the access log.

The id is the header `x-request-id` of the request, or a new one. It is sent back, and all records and traces of the
request have it, in the coordinator and the replicas too (`specdec.observability.logging`).
"""

from __future__ import annotations

import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.sse import CLIENT_GONE
from specdec.observability.logging import X_REQUEST_ID, bind_task, clean_request_id

REQUEST_ID_HEADER = "x-request-id"
#: Paths that are polled. Their requests are logged at debug only.
POLLED = frozenset(("/health", "/ready", "/metrics"))
_MAX_PATH_CHARACTERS = 512

_log = logging.getLogger("gateway.access")


class Logged:
    """Names and logs the requests of an application."""

    def __init__(self, app: ASGIApp, *, has_access_log: bool) -> None:
        self._app, self._has_access_log = app, has_access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = clean_request_id(Headers(scope=scope).get(REQUEST_ID_HEADER, "")) or uuid.uuid4().hex
        scope.setdefault("state", {})[X_REQUEST_ID] = request_id
        bind_task(**{X_REQUEST_ID: request_id})  # the server has a task for each request, and logs its failures there
        began_s, status, num_bytes = time.monotonic(), CLIENT_GONE, 0

        async def noted(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            else:
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:  # becomes an answer in the framework's outermost layer
            status = 500
            raise
        finally:
            if self._has_access_log:
                _write(scope, status, num_bytes, time.monotonic() - began_s)


def _write(scope: Scope, status: int, num_bytes: int, duration_s: float) -> None:
    """Write one record. The query is left out, and the path is as it was sent, without control characters."""
    client = scope.get("client")
    _log.log(
        logging.DEBUG if scope["path"] in POLLED else logging.INFO,
        "http request",
        extra={
            "method": scope["method"][:32],
            "path": scope["raw_path"].decode("latin-1")[:_MAX_PATH_CHARACTERS],
            "status": status,
            "duration_s": round(duration_s, 4),
            "num_bytes": num_bytes,
            "client": client[0] if client else "",
        },
    )
