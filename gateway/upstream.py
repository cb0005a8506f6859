"""The coordinators behind the gateway: the connection to them, what they serve, and the names of the model.

Every route calls coordinators through this module, and `gateway.outputs` runs outputs on its clients. They are those
of `--coordinator`, or those that the registry lists. A description of what is served is kept for a second, so that a
request seldom waits for one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from specdec.access.service_key import ServiceKey
from specdec.client import AsyncClient, Budgets, ServerInfo
from specdec.client.endpoints import join_endpoints
from specdec.contract.errors import Forbidden, NotFound, SpecdecError, Unauthenticated, Unavailable
from specdec.settings.addresses import join_address, split_address
from specdec.settings.gateway import GatewaySettings
from specdec.state.live_coordinators import live_coordinators
from specdec.state.redis_store import open_registry
from specdec.state.store import ReplicaRegistry

#: Age at which a description is asked for again, in the background.
_FRESH_S = 1.0
#: Age from which a request waits for a new description.
_STALE_S = 30.0
#: Interval at which the registry is read.
_DISCOVERY_INTERVAL_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """Description of the served model, as requests need it."""

    names: tuple[str, ...]
    """Names of the model, the one that answers show first."""
    max_context_tokens: int
    default_sampling: Mapping[str, float | int]
    """Sampling parameters that the model recommends; empty if they are turned off."""
    info: ServerInfo

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters. A name that the model has too always means the model."""
        return tuple(dict.fromkeys(each.name for each in self.info.adapters if each.name not in self.names))

    def require(self, model: str | None) -> str:
        """Return the model's name in answers to a request that names `model`.

        Raises:
            NotFound: the request names another model.
        """
        if self.has(model):
            return model or self.names[0]
        raise NotFound(
            f"the model {str(model)[:128]!r} does not exist; this server has "
            f"{', '.join((*self.names, *self.adapters))}",
            reason="MODEL_NOT_FOUND",
            field="model",
        )

    def has(self, model: str | None) -> bool:
        """Return whether a request may name `model`."""
        return model is None or model in self.names or model in self.adapters

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter of a request that names `model`, as `GenerateOptions` has it: "" for the model itself."""
        return model if model is None or model in self.adapters else ""


class _Connection:
    """Clients of one set of coordinators."""

    def __init__(self, endpoint: str, settings: GatewaySettings, api_key: str | None) -> None:
        """Raises InvalidRequest if the endpoint has the wrong form."""
        self.endpoint = endpoint
        budgets = Budgets(connect_s=settings.retry_s, resume_s=settings.resume_s)
        common: Any = {
            "api_key": api_key,
            "remembers_sessions": False,
            "tls": settings.channel_tls or False,
            "insecure": True,  # --tls-ca decides; the client logs that it sends a key in plaintext
        }
        self.client = AsyncClient(endpoint, budgets=budgets, **common)
        once = Budgets(connect_s=0.0, resume_s=settings.resume_s)
        self.prober = AsyncClient(endpoint, budgets=once, **common)
        """Client that does not try again before the first answer."""

    async def close(self) -> None:
        await self.client.close()
        await self.prober.close()


class Upstream:
    """The coordinators of one gateway. Used from one event loop; call `start` first."""

    def __init__(self, settings: GatewaySettings, service_key: ServiceKey | None = None) -> None:
        """
        Args:
            settings: the gateway's settings.
            service_key: sent to coordinators, and checked in the registry; None: none is.
        """
        self._settings = settings
        self._service_key = service_key
        self._connections: list[_Connection] = []
        """Connections in the order in which they were made. The last one gets new calls; streams may still use others,
        so none is closed before the end. The coordinators of a system change seldom."""
        self._registry: ReplicaRegistry | None = None
        self._discovering: asyncio.Task[None] | None = None
        self._served: Served | None = None
        self._described_s = 0.0
        """Time of the last description."""
        self._describing: asyncio.Task[None] | None = None
        self._hidden: set[str] = set()
        """Adapters that a name of the model hides."""
        self._failure: SpecdecError | None = None
        """Why the last description failed; None if it did not."""

    async def start(self) -> None:
        """Prepare the connection, or begin to look for coordinators in the registry.

        Raises:
            SpecdecError: a coordinator's address has the wrong form or cannot be resolved, or the registry's has.
        """
        if self._settings.coordinator:
            self._connect(await endpoint_of(self._settings.coordinator))
            return
        self._registry = open_registry(
            self._settings.redis_url, cluster=self._settings.cluster, signer=self._service_key
        )
        self._discovering = asyncio.create_task(self._discover(self._registry), name="discover coordinators")

    def client(self, tenant: str, *, tries_again: bool = True) -> AsyncClient:
        """Return the client for a tenant's calls.

        Args:
            tenant: the tenant; "" is the coordinator's own.
            tries_again: whether a call without an answer is tried again.

        Raises:
            Unavailable: no coordinator has been found yet.
        """
        connection = self._connection()
        client = connection.client if tries_again else connection.prober
        return client.for_tenant(tenant) if tenant else client

    async def served(self, model: str | None = None) -> Served:
        """Return what is served, as it was a second ago; as it is now, if it did not have `model` then.

        Raises SpecdecError while no coordinator answers.
        """
        age_s = time.monotonic() - self._described_s
        if self._served is not None and age_s < _FRESH_S:
            return self._served
        if self._describing is None or self._describing.done():
            self._describing = asyncio.create_task(self._describe(), name="describe upstream")
        if self._served is None or age_s >= _STALE_S or not self._served.has(model):
            await asyncio.shield(self._describing)
            if self._failure is not None:
                raise self._failure
        assert self._served is not None  # a description that did not fail has set it
        return self._served

    @property
    def last_served(self) -> Served | None:
        """Return the description of what is served that was read last; None before the first one."""
        return self._served

    async def probe(self) -> ServerInfo:
        """Return what is served now, from one attempt. Raises SpecdecError."""
        return await self._connection().prober.info()

    async def close(self) -> None:
        for task in (self._describing, self._discovering):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        for connection in self._connections:
            await connection.close()
        if self._registry is not None:
            await self._registry.close()

    def _connection(self) -> _Connection:
        if not self._connections:
            raise Unavailable("no coordinator is registered yet", reason="COORDINATOR_UNAVAILABLE", retry_after_s=1.0)
        return self._connections[-1]

    def _connect(self, endpoint: str) -> None:
        """Use a connection to `endpoint` from now on. Raises InvalidRequest if it has the wrong form."""
        known = next((each for each in self._connections if each.endpoint == endpoint), None)
        if known is None:
            api_key = self._service_key.bearer if self._service_key else None
            known = _Connection(endpoint, self._settings, api_key)
        else:
            self._connections.remove(known)
        self._connections.append(known)

    async def _describe(self) -> None:
        """Ask for a description and keep it, or the error."""
        try:
            info = await self._connection().client.info()
        except (Unauthenticated, Forbidden) as error:  # of this gateway, not of its caller
            self._failure = Unavailable(
                f"the coordinator refuses this gateway; both need the same --service-key: {error.message}",
                reason="COORDINATOR_UNAVAILABLE",
                retry_after_s=1.0,
            )
            _log.error("%s", self._failure.message)
            return
        except SpecdecError as error:
            self._failure = error
            return
        recommended = info.default_sampling if self._settings.generation_config == "on" else {}
        names = self._settings.served_model_name or (_base_name(info.target_model),)
        self._served = Served(names, info.max_context_tokens, MappingProxyType(dict(recommended)), info)
        self._warn_of_hidden(self._served)
        self._described_s, self._failure = time.monotonic(), None

    def _warn_of_hidden(self, served: Served) -> None:
        """Log once that a name of the model hides an adapter."""
        hidden = {each.name for each in served.info.adapters} - {*served.adapters, *self._hidden}
        self._hidden |= hidden
        for name in sorted(hidden):
            _log.warning(
                "%s names the model and one of its adapters, and requests get the model: give the adapter another name "
                "(--adapter NAME=%s of the target) or the model (--served-model-name)", name, name
            )  # fmt: skip

    async def _discover(self, registry: ReplicaRegistry) -> None:
        """Follow the registry until cancelled. While it cannot be read, the coordinators found last are used."""
        while True:
            try:
                if addresses := await live_coordinators(registry):
                    endpoint = await endpoint_of(addresses)
                    if not self._connections or self._connections[-1].endpoint != endpoint:
                        self._connect(endpoint)
                        _log.info("coordinators found", extra={"endpoint": endpoint})
            except SpecdecError as error:
                _log.warning("cannot look for coordinators, trying again: %s", error)
            await asyncio.sleep(_DISCOVERY_INTERVAL_S)


async def endpoint_of(coordinators: Sequence[str]) -> str:
    """Return the endpoint of a client for one or several coordinators: of IPv4 if all have it, else of IPv6.

    Raises:
        Unavailable: several are given, and a name has no address, or they have no family of addresses in common.
    """
    if len(coordinators) == 1:
        return coordinators[0]
    found = [await _resolved(address) for address in coordinators]
    for family in (socket.AF_INET, socket.AF_INET6):
        addresses = [sorted(each[family]) for each in found if family in each]
        if len(addresses) == len(found):
            return join_endpoints(list(dict.fromkeys(address for each in addresses for address in each)))
    raise Unavailable(
        f"coordinator: {', '.join(coordinators)} have neither IPv4 nor IPv6 addresses all together",
        reason="COORDINATOR_UNAVAILABLE",
    )


async def _resolved(address: str) -> dict[int, set[str]]:
    """Return HOST:PORT of every address of a coordinator, by family."""
    try:
        host, port = split_address(address)
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (ValueError, OSError) as error:
        raise Unavailable(
            f"coordinator: {address!r} has no address: {error}", reason="COORDINATOR_UNAVAILABLE"
        ) from error
    by_family: dict[int, set[str]] = {}
    for family, *_, where in found:
        by_family.setdefault(family, set()).add(join_address(str(where[0]), port))
    return by_family


def _base_name(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2] or model
