"""The ASGI layer that records a span of each HTTP request and continues the trace that its headers name.

The span is the current one while the request runs, so `gateway.outputs` sends its trace context to the coordinator.
Probes and metrics, which would fill a trace store, are not recorded.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.access_log import POLLED
from specdec.observability.tracing import TRACEPARENT, Span, Tracing, current_span, request_id_attributes, trace_headers


class Traced:
    """Records the requests of an application."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in POLLED:
            await self._app(scope, receive, send)
            return
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"], **request_id_attributes()}
        span = self._tracing.begin(scope["method"], trace_headers(_decoded(scope["headers"])), attributes=attributes)

        async def note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                _note_status(span, message["status"])
            await send(message)

        with span.active():
            try:
                await self._app(scope, receive, note_status)
            finally:
                _name_after_route(span, scope)


def traceparent() -> str | None:
    """Return the trace context for a call that the current request makes, for the SDK's option of that name."""
    span = current_span()
    return None if span is None else span.headers[TRACEPARENT]


def _decoded(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[str, str]]:
    return ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)


def _note_status(span: Span, status: int) -> None:
    span.set({"http.response.status_code": status})
    if status >= 500:
        span.fail(str(status))


def _name_after_route(span: Span, scope: Scope) -> None:
    """Name the span after the route's template, of which there are few; paths hold ids."""
    route = getattr(scope.get("route"), "path", None)
    if route is not None:
        span.rename(f"{scope['method']} {route}")
        span.set({"http.route": route})
