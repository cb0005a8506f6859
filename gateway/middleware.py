"""ASGI layers around the routes: measuring, hosts and API keys. `gateway.bodies` has the one that reads bodies.

They are plain ASGI: a stream passes them without a task or a queue of its own. A request that passes goes to a route,
such as `gateway.routes.chat`.
"""

from __future__ import annotations

import time

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
from specdec.contract.errors import Forbidden, SpecdecError, Unauthenticated
from specdec.settings.addresses import HostRule

#: Paths that need a key where there are keys.
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
