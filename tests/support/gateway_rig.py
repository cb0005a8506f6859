"""A gateway in this process, on a port of its own, in front of any coordinator. For tests of the gateway over HTTP."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from gateway.app import build_app
from gateway.auth import ApiKeys
from gateway.context import Gateway
from gateway.http_server import bind, serve
from gateway.metrics import GatewayMetrics
from gateway.upstream import Upstream
from specdec.access.service_key import ServiceKey
from specdec.observability.tracing import Tracing
from specdec.settings.gateway import GatewaySettings
from specdec.state.stored_responses import RedisResponses

_POLL_S = 0.01

#: Address at which nothing listens.
NOWHERE = "127.0.0.1:1"


@dataclass(frozen=True)
class RunningGateway:
    """A gateway that serves."""

    gateway: Gateway
    port: int
    http: httpx2.AsyncClient
    """Client of this gateway."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a bare connection."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    def count(self, name: str, **labels: str) -> float:
        """Return the value of a series of the gateway, 0 if it does not exist."""
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def running_gateway(
    coordinator: str = NOWHERE,
    *,
    keys: ApiKeys | None = None,
    service_key: ServiceKey | None = None,
    tracing: Tracing | None = None,
    trusted: str = "",
    **settings: Any,
) -> AsyncIterator[RunningGateway]:
    """A gateway in front of `coordinator`, or for "" of those in the registry, with these settings.

    Its client trusts the certificates in the file `trusted`.
    """
    chosen = GatewaySettings(
        **{
            "listen": "127.0.0.1:0",
            "coordinator": (coordinator,) if coordinator else (),
            "retry_s": 0.2,
            "drain_grace_s": 1.0,
            **settings,
        }
    )
    upstream, stop = Upstream(chosen, service_key), asyncio.Event()
    await upstream.start()
    responses = RedisResponses(chosen.redis_url)
    gateway = Gateway(chosen, upstream, keys or ApiKeys(), GatewayMetrics(), responses, tracing)
    with bind(chosen.listen) as listener:
        port = listener.getsockname()[1]
        serving = asyncio.create_task(serve(build_app(gateway), listener, chosen, stop))
        try:
            scheme = "https" if chosen.server_tls else "http"
            verify = ssl.create_default_context(cafile=trusted) if trusted else True
            async with httpx2.AsyncClient(
                base_url=f"{scheme}://127.0.0.1:{port}", timeout=120, verify=verify
            ) as client:
                yield RunningGateway(gateway, port, client)
        finally:
            stop.set()
            await serving
            await upstream.close()
            await responses.close()


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until `condition()` is true.

    Conditions here read a registry or the open files, which takes long. Without a pause between two readings the event
    loop would hold the interpreter, and a step on the device thread could outlast the limit of the watchdog.
    """
    while True:
        if condition():
            return
        await asyncio.sleep(_POLL_S)
