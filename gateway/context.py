"""The parts of one gateway, which its routes share."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from gateway.auth import Access, ApiKeys
from gateway.metrics import GatewayMetrics
from gateway.upstream import Upstream
from specdec.client import AsyncClient
from specdec.observability.tracing import Tracing
from specdec.settings.gateway import GatewaySettings

#: Key of the request's state under which `access` puts what the caller may do.
ACCESS = "access"


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts of one gateway."""

    settings: GatewaySettings
    upstream: Upstream
    keys: ApiKeys
    metrics: GatewayMetrics
    tracing: Tracing | None = None

    def client(self, request: Request) -> AsyncClient:
        """Return the client for calls of the request's tenant."""
        access: Access = request.scope["state"][ACCESS]
        return self.upstream.client(access.tenant)


def wants_event_ids(request: Request) -> bool:
    """Return whether the client names event streams among what it accepts, and so understands events with ids."""
    return "text/event-stream" in request.headers.get("accept", "")
