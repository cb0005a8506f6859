"""The coordinators behind the gateway: one connection, what they serve, and the names of the model.

Every route calls coordinators through this module. A description of what is served is kept for a second, so that a
request seldom waits for one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from types import MappingProxyType

from specdec.client import AsyncClient, Budgets, ServerInfo
from specdec.errors import InvalidRequest, NotFound, SpecdecError
from specdec.settings.addresses import split_address
from specdec.settings.gateway import GatewaySettings

MODEL_NOT_FOUND = "MODEL_NOT_FOUND"

#: Age at which a description is asked for again, in the background.
_FRESH_S = 1.0
#: Age from which a request waits for a new description.
_STALE_S = 30.0


@dataclass(frozen=True, slots=True)
class Served:
    """What the coordinators serve, as requests need it."""

    names: tuple[str, ...]
    """Names of the model, the one that answers show first."""
    max_context_tokens: int
    default_sampling: Mapping[str, float | int]
    """Sampling parameters that the model recommends; empty if they are turned off."""
    info: ServerInfo

    @property
    def name(self) -> str:
        return self.names[0]

    def require(self, model: str | None) -> str:
        """Return the model's name in answers to a request that names `model`.

        Raises:
            NotFound: the request names another model.
        """
        if model is None or model in self.names:
            return model or self.name
        raise NotFound(
            f"the model {model[:128]!r} does not exist; this server has {', '.join(self.names)}",
            reason=MODEL_NOT_FOUND,
            field="model",
        )


class Upstream:
    """The coordinators of one gateway. Used from one event loop."""

    def __init__(self, settings: GatewaySettings) -> None:
        """
        Raises:
            InvalidRequest: a coordinator's address has the wrong form.
        """
        endpoint = endpoint_of(settings.coordinator)
        budgets = Budgets(connect_s=settings.retry_s, resume_s=settings.resume_s)
        self._client = AsyncClient(endpoint, budgets=budgets, tracks_sessions=False)
        self._prober = AsyncClient(endpoint, budgets=Budgets(connect_s=0.0), tracks_sessions=False)
        self._served_names = settings.served_model_name
        self._uses_recommended = settings.generation_config == "on"
        self._served: Served | None = None
        self._asked_s = 0.0
        """Time of the last description."""
        self._asking: asyncio.Task[Served] | None = None

    def client(self, tenant: str) -> AsyncClient:
        """Return the client for a tenant's calls; "" is the coordinator's own tenant."""
        return self._client.for_tenant(tenant) if tenant else self._client

    async def served(self) -> Served:
        """Return what is served, as it was a second ago. Raises SpecdecError while no coordinator answers."""
        age_s = time.monotonic() - self._asked_s
        if self._served is None or age_s >= _STALE_S:
            return await asyncio.shield(self._ask())
        if age_s >= _FRESH_S:
            self._ask()
        return self._served

    async def probe(self) -> ServerInfo:
        """Return what is served now, from one attempt. Raises SpecdecError."""
        return await self._prober.info()

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})
        await self._client.close()
        await self._prober.close()

    def _ask(self) -> asyncio.Task[Served]:
        """Return the task that asks for a description; there is one at a time."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._describe(), name="describe upstream")
            self._asking.add_done_callback(_note_failure)
        return self._asking

    async def _describe(self) -> Served:
        info = await self._client.info()
        recommended: Mapping[str, float | int] = info.default_sampling if self._uses_recommended else {}
        names = self._served_names or (_base_name(info.target_model),)
        self._served = Served(names, info.max_context_tokens, MappingProxyType(dict(recommended)), info)
        self._asked_s = time.monotonic()
        return self._served


def endpoint_of(coordinators: tuple[str, ...]) -> str:
    """Return the endpoint of a client for one or several coordinators.

    Raises:
        InvalidRequest: several are given, and one is not an IPv4 address with a port.
    """
    if len(coordinators) == 1:
        return coordinators[0]
    for address in coordinators:
        try:
            IPv4Address(split_address(address)[0])
        except ValueError:
            raise InvalidRequest(
                f"coordinator: several must be IPv4 addresses with a port, not {address!r}; give one name that resolves "
                "to all of them, as dns:///NAME:PORT",
                field="coordinator",
            ) from None
    if not coordinators:
        raise InvalidRequest("coordinator: must not be empty", field="coordinator")
    return "ipv4:" + ",".join(coordinators)


def _base_name(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2] or model


def _note_failure(task: asyncio.Task[Served]) -> None:
    """Mark the task's error as seen: a request that waits for the task raises it, and others keep the old answer."""
    if not task.cancelled() and isinstance(task.exception(), SpecdecError):
        return
