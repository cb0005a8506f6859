"""The parts of one gateway, which its routes share."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from gateway.auth import ApiKeys
from gateway.metrics import GatewayMetrics
from gateway.upstream import Upstream
from specdec.access.grants import Access
from specdec.client import AsyncClient
from specdec.contract.payer import key_id_of
from specdec.contract.tenant import DEFAULT_TENANT
from specdec.observability.logging import X_REQUEST_ID
from specdec.observability.tracing import Tracing
from specdec.settings.gateway import GatewaySettings
from specdec.state.stored_responses import RedisResponses

#: Key of the request's state under which `access` puts what the caller may do.
ACCESS = "access"


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts of one gateway."""

    settings: GatewaySettings
    upstream: Upstream
    keys: ApiKeys
    metrics: GatewayMetrics
    responses: RedisResponses
    """Stored responses of /v1/responses."""
    tracing: Tracing | None = None

    def client(self, request: Request, *, tries_again: bool = True) -> AsyncClient:
        """Return the client for calls of the request and its tenant. Arguments and errors as of `Upstream.client`."""
        client = self.upstream.client(_tenant_of(request), tries_again=tries_again)
        if key_id := key_id_of(_access_of(request).key_hash):
            client = client.for_key(key_id)
        return client.for_request(request.scope["state"][X_REQUEST_ID])

    def store_tenant(self, request: Request) -> str:
        """Return the tenant in the store's keys of a request; those of a caller without one have the usual name."""
        return _tenant_of(request) or DEFAULT_TENANT


def _tenant_of(request: Request) -> str:
    return _access_of(request).tenant


def _access_of(request: Request) -> Access:
    access: Access = request.scope["state"][ACCESS]
    return access


def wants_event_ids(request: Request) -> bool:
    """Return whether the client names event streams among what it accepts, and so understands events with ids.

    HEAD asks for no events, and so resumes no stream.
    """
    return request.method != "HEAD" and "text/event-stream" in request.headers.get("accept", "")
