"""The ASGI layer that reads how long a client waits for its answer, and the time that is left of it.

`gateway.outputs` sends the time to the coordinator, which refuses a request that would end too late.
"""

from __future__ import annotations

import math
import time
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http_errors import error_response
from specdec.contract.errors import InvalidRequest

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
