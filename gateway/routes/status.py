"""/health, /ready, /version and /metrics."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from gateway.answers import ERRORS, json_response
from gateway.context import Gateway
from specdec.contract.errors import Unavailable
from specdec.contract.version import __version__

_TARGET = "target"


def router(gateway: Gateway) -> APIRouter:
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
        """Return the version of this gateway."""
        return json_response({"version": __version__})

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the gateway's series for Prometheus."""
        return Response(gateway.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return routes
