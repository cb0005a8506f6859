"""/v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from gateway.answers import ERRORS, json_response
from gateway.context import Gateway
from gateway.upstream import Served


def router(gateway: Gateway) -> APIRouter:
    """Return the routes of models."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.get("/v1/models", response_model=None, responses=ERRORS)
    async def list_models() -> Response:
        """List the names of the served model."""
        served = await gateway.upstream.served()
        return json_response({"object": "list", "data": [_model(name, served) for name in served.names]})

    @routes.get("/v1/models/{model:path}", response_model=None, responses=ERRORS)
    async def retrieve_model(model: str) -> Response:
        """Describe the served model."""
        served = await gateway.upstream.served()
        return json_response(_model(served.require(model), served))

    return routes


def _model(name: str, served: Served) -> dict[str, Any]:
    info = served.info
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "specdec",
        "root": info.target_model,
        "parent": None,
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
