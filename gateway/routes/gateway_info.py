"""Routes about the gateway itself: /health, /ready, /version and /metrics, /v1/models, and the playground at /."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import FileResponse, PlainTextResponse, Response

from gateway.answers import ERRORS, json_response
from gateway.context import Gateway
from gateway.upstream import Served
from specdec.contract.errors import Unavailable
from specdec.contract.version import __version__, build_of

_TARGET = "target"


def status_router(gateway: Gateway) -> APIRouter:
    """Return the routes that tell how the gateway is."""
    routes = APIRouter(tags=["status"])

    @routes.get("/health", response_model=None)
    async def health() -> Response:
        """Tell that the gateway runs."""
        return json_response({"status": "ok"})

    @routes.get("/ready", response_model=None, responses={503: ERRORS[503]})
    async def ready() -> Response:
        """Tell whether a coordinator answers and has a target replica that takes requests."""
        pools = (await gateway.upstream.probe()).pools
        targets = [replica for pool in pools if pool.role == _TARGET for replica in pool.replicas]
        if not any(not replica.draining for replica in targets):
            raise Unavailable("no target replica takes requests", reason="REPLICA_UNAVAILABLE")
        return json_response({"status": "ready", "num_targets": len(targets)})

    @routes.get("/version", response_model=None)
    async def version() -> Response:
        """Return the version and the build of this gateway."""
        return json_response({"version": __version__, "build": build_of("gateway")})

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the gateway's series for Prometheus."""
        return Response(gateway.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return routes


_FILES = Path(__file__).parents[1] / "playground"
_PAGE = "index.html"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def playground_router() -> APIRouter:
    """Return one route for each file. A route for every path would hide which methods the other routes take."""
    routes = APIRouter()
    for path in sorted(_FILES.iterdir()):
        name = "" if path.name == _PAGE else path.name
        routes.add_route(f"/{name}", _sender(path), methods=["GET"], include_in_schema=False)
    return routes


def _sender(path: Path) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        return FileResponse(path, headers=_HEADERS)

    return send


def models_router(gateway: Gateway) -> APIRouter:
    """Return the routes of models."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.get("/v1/models", response_model=None, responses=ERRORS)
    async def list_models() -> Response:
        """List the names of the served model and of its adapters."""
        served = await gateway.upstream.served()
        names = (*served.names, *served.adapters)
        return json_response({"object": "list", "data": [_model(name, served) for name in names]})

    @routes.get("/v1/models/{model:path}", response_model=None, responses=ERRORS)
    async def retrieve_model(model: str) -> Response:
        """Describe the served model, or one of its adapters."""
        served = await gateway.upstream.served(model)
        return json_response(_model(served.require(model), served))

    return routes


def _model(name: str, served: Served) -> dict[str, Any]:
    info, is_adapter = served.info, bool(served.adapter_of(name))
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "specdec",
        "root": name if is_adapter else info.target_model,
        "parent": served.names[0] if is_adapter else None,
        "max_model_len": served.max_context_tokens,
        "specdec": {
            "version": info.version,
            "vocabulary_size": info.vocabulary_size,
            "max_gamma": info.max_gamma,
            "default_sampling": dict(served.default_sampling),
            "pools": [
                {"name": pool.name, "role": pool.role, "model": pool.model, "num_replicas": len(pool.replicas)}
                for pool in info.pools
            ],
        },
    }
