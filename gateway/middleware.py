"""ASGI layers around the routes: ids, traces, deadlines, measuring, hosts and API keys.

They are plain ASGI: a stream passes them without a further task or queue. A request that passes goes to a route, such
as `gateway.routes.chat`. `gateway.bodies` has the layer that reads bodies.

- The id of a request is its header `x-request-id`, or a new one. It is sent back, and all records and traces of the
  request have it, in the coordinator and the replicas too (`specdec.observability.logging`).
- The span of a request is the current one while the request runs, so `gateway.outputs` sends its trace context to the
  coordinator. Probes and metrics, which would fill a trace store, are not recorded.
- `gateway.outputs` sends the time that is left to the coordinator, which refuses a request that would end too late.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Iterable
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.auth import ApiKeys
from gateway.context import ACCESS, wants_event_ids
from gateway.http_errors import error_response
from gateway.metrics import GatewayMetrics
from gateway.sse import CLIENT_GONE, ClientGone
from specdec.access.grants import Access
from specdec.access.guards import RefusalLog
from specdec.contract.errors import Forbidden, InvalidRequest, SpecdecError, Unauthenticated
from specdec.observability.logging import X_REQUEST_ID, bind_task, clean_request_id
from specdec.observability.tracing import TRACEPARENT, Span, Tracing, current_span, request_id_attributes, trace_headers
from specdec.settings.addresses import HostRule

#: Header with which a client says how many seconds it waits for the whole answer.
TIMEOUT_HEADER = "specdec-timeout"

#: Header with which Envoy says after how many milliseconds it gives up on the answer.
ENVOY_HEADER = "x-envoy-expected-rq-timeout-ms"

#: Time given to a call whose time is over, so that it ends as any call whose deadline passes.
_LEAST_S = 0.001

_deadline_s: ContextVar[float | None] = ContextVar("deadline_s", default=None)


class Deadlines:
    """Keeps the deadline of each request while it runs."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            timeout_s = _timeout_s(Headers(scope=scope))
        except InvalidRequest as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        token = _deadline_s.set(None if timeout_s is None else time.monotonic() + timeout_s)
        try:
            await self._app(scope, receive, send)
        finally:
            _deadline_s.reset(token)


def time_left_s() -> float | None:
    """Return the time that the current request has left, for the SDK's option `timeout`; None: no limit."""
    deadline_s = _deadline_s.get()
    return None if deadline_s is None else max(_LEAST_S, deadline_s - time.monotonic())


def _timeout_s(headers: Headers) -> float | None:
    """Return the time that the headers name. Raises InvalidRequest unless it is a number above 0."""
    for name, unit_s in ((TIMEOUT_HEADER, 1.0), (ENVOY_HEADER, 1e-3)):
        if (text := headers.get(name)) is not None:
            try:
                timeout_s = float(text) * unit_s
            except ValueError:
                timeout_s = math.nan
            if not 0.0 < timeout_s < math.inf:
                raise InvalidRequest(f"{name}: must be a number above 0, got {text[:64]!r}", field=name)
            return timeout_s
    return None


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


#: Paths that need a key if there are keys.
_GUARDED = ("/v1/", "/tokenize", "/detokenize")
_BEARER = "bearer "
_FAILED = 500
_MAX_SHOWN_CHARACTERS = 64


class WithoutSlash:
    """Serves a path with slashes at its end as the path without them.

    The framework would redirect such a request, to a URL whose scheme behind a proxy is not the client's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            raw: bytes = scope["raw_path"]  # a slash that is a part of an id is %2F there
            num_slashes = len(raw) - len(raw.rstrip(b"/"))
            scope["path"] = scope["path"][: len(scope["path"]) - num_slashes] or "/"
        await self._app(scope, receive, send)


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
            async with self._keys.admitted(access):
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


class KnownHosts:
    """Refuses requests whose Host is not served."""

    def __init__(self, app: ASGIApp, serves: HostRule) -> None:
        self._app, self._serves = app, serves

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = Headers(scope=scope).getlist("host") if scope["type"] == "http" else []
        if self._serves(hosts):
            await self._app(scope, receive, send)
            return
        error = Forbidden(
            f"host: without API keys, {', '.join(hosts)[:_MAX_SHOWN_CHARACTERS]!r} is not served; use a name of "
            "loopback such as localhost, or start the gateway with --allowed-host NAME or with API keys",
            field="host",
        )
        await error_response(error, scope["path"])(scope, receive, send)


def _is_resumption(scope: Scope) -> bool:
    """Return whether a request without a body continues a generation, which counts as one of the caller's."""
    return scope["method"] == "GET" and wants_event_ids(Request(scope))


def _key_of(headers: Headers) -> str | None:
    authorization = headers.get("authorization", "")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return headers.get("x-api-key")
