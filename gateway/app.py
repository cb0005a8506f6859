"""Builds the gateway's ASGI application: routes, error answers, and the layers around them."""

from __future__ import annotations

import logging
from functools import partial

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from gateway.bodies import LimitedBody
from gateway.context import Gateway
from gateway.http_errors import error_response, read_validation_error
from gateway.middleware import (
    REQUEST_ID_HEADER,
    Authenticated,
    Deadlines,
    KnownHosts,
    Logged,
    Measured,
    Traced,
    WithoutSlash,
)
from gateway.routes import chat, completions, gateway_info, messages, responses, sessions, tokens
from specdec.contract.errors import Internal, InvalidRequest, NotFound, SpecdecError
from specdec.contract.version import __version__
from specdec.observability.logging import X_REQUEST_ID
from specdec.settings.addresses import host_rule

_log = logging.getLogger(__name__)

_SERVED = "this server generates text; GET /openapi.json lists its routes"


def build_app(gateway: Gateway) -> FastAPI:
    """Return the application of one gateway."""
    app = FastAPI(
        title="specdec",
        summary="OpenAI-compatible HTTP over distributed speculative decoding",
        version=__version__,
        middleware=_layers(gateway),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    routers = [module.router for module in (chat, completions, responses, messages, sessions, tokens)]
    for make_router in (*routers, gateway_info.models_router, gateway_info.status_router):
        router = make_router(gateway)
        app.include_router(router)
        _answer_head(app, router)
        gateway.metrics.begin_at_zero(route.path for route in router.routes if isinstance(route, Route))
    app.add_exception_handler(SpecdecError, partial(_on_error, gateway))
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_failure)
    app.include_router(gateway_info.playground_router())
    return app


def _answer_head(app: FastAPI, router: APIRouter) -> None:
    """Let every route of `router` that answers GET answer HEAD too; the server leaves the body out."""
    for route in router.routes:
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            app.add_api_route(
                route.path, route.endpoint, methods=["HEAD"], response_model=None, include_in_schema=False
            )


def _layers(gateway: Gateway) -> list[Middleware]:
    """Return the layers around the routes, the outermost first."""
    settings = gateway.settings
    layers = [
        Middleware(Logged, has_access_log=settings.access_log == "on"),
        Middleware(WithoutSlash),
        Middleware(Measured, metrics=gateway.metrics),
    ]
    if gateway.tracing is not None:
        layers.append(Middleware(Traced, tracing=gateway.tracing))
    if gateway.keys.answers_anyone:
        layers.append(Middleware(KnownHosts, serves=host_rule(settings.listen, settings.allowed_host)))
    if settings.cors_origin:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_origin),
                allow_methods=["GET", "HEAD", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID_HEADER],
            )
        )
    layers.append(Middleware(Deadlines))
    layers.append(Middleware(Authenticated, keys=gateway.keys))
    layers.append(Middleware(LimitedBody, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s))
    return layers


async def _on_error(gateway: Gateway, request: Request, error: Exception) -> Response:
    assert isinstance(error, SpecdecError)  # the handler is registered for these
    if error.reason == "CONTEXT_TOO_LONG" and (served := gateway.upstream.last_served):
        error.numbers.setdefault("max_context_tokens", served.max_context_tokens)
    if error.code == "INTERNAL":
        _log.error("request failed: %s", error.message, extra={"path": request.url.path})
    return error_response(error, request.url.path)


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # the handler is registered for these
    told = read_validation_error(error.errors(), request.headers.get("content-type", ""))
    return error_response(told, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer for a path or method that does not exist, and for a body that the framework cannot read."""
    assert isinstance(error, HTTPException)  # the handler is registered for these
    path, headers = request.url.path, error.headers
    if error.status_code == 404:
        told: SpecdecError = NotFound(f"there is nothing at {path[:256]}: {_SERVED}", reason="NOT_FOUND")
    elif error.status_code == 405:
        told = InvalidRequest(f"{path[:256]} does not take {request.method}", reason="METHOD_NOT_ALLOWED")
        if methods := _methods_of(request):
            methods |= {"HEAD"} if "GET" in methods else set()
            headers = {"allow": ", ".join(sorted(methods))}
    else:
        told = InvalidRequest(str(error.detail))
    return error_response(told, path, status=error.status_code, headers=headers)


def _methods_of(request: Request) -> set[str]:
    """Return the methods of a path by all its routes, of which the framework tells the first; empty if unknown."""
    path = getattr(request.scope.get("route"), "path_format", "")
    return {method.upper() for method in request.app.openapi()["paths"].get(path, ())}


async def _on_failure(request: Request, error: Exception) -> Response:
    """Answer for an error of the gateway itself, whose traceback the server logs. No layer sees this answer."""
    request_id = request.scope["state"][X_REQUEST_ID]
    failure = Internal(f"the gateway failed; its log has the cause under the request id {request_id}")
    return error_response(failure, request.url.path, headers={REQUEST_ID_HEADER: request_id})
