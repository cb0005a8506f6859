"""The gRPC server of every service: error mapping, health, reflection, limits and an orderly shutdown.

    server = ServiceServer("0.0.0.0:50061", service_names=(DRAFT_SERVICE,))
    servicer.add_to(server.grpc_server)
    await server.start()          # the port is bound; health is NOT_SERVING
    ...                           # warm up
    await server.set_serving()
    ...
    await server.stop(grace_s)    # NOT_SERVING; new calls are refused, calls in flight finish

Signals and draining are handled by `specdec.service` and the coordinator's `__main__`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specdec.errors import Unavailable
from specdec.rpc.channels import open_port, require_free
from specdec.rpc.interceptors import ErrorInterceptor
from specdec.settings.addresses import is_loopback, join_address, split_address
from specdec.tls import Tls

DRAFT_SERVICE = "specdec.v1.DraftService"
TARGET_SERVICE = "specdec.v1.TargetService"
COORDINATOR_SERVICE = "specdec.v1.CoordinatorService"
VLLM_SERVICE = "vllm.grpc.engine.VllmEngine"

_log = logging.getLogger(__name__)


class ServiceServer:
    """A service's gRPC server with its health service, and optionally a second port with health alone.

    Construct it inside a running event loop and use it from that loop.
    """

    def __init__(
        self,
        listen: str,
        *,
        service_names: Sequence[str],
        health_address: str = "",
        max_message_bytes: int = 4 << 20,
        tls: Tls | None = None,
        demands_client_certificate: bool = False,
        loopback_address: str = "",
        check_caller: Callable[[str, Any], None] | None = None,
    ) -> None:
        """
        Args:
            listen: HOST:PORT; port 0 chooses a free port.
            service_names: full protobuf names, for health and reflection.
            health_address: HOST:PORT of a plaintext port that serves health alone, or "".
            max_message_bytes: gRPC itself refuses a larger message (RESOURCE_EXHAUSTED) before it is decoded.
            tls: credentials of the port of `listen`; None: plaintext.
            demands_client_certificate: whether `listen` refuses clients without a certificate of `tls.ca`.
            loopback_address: HOST:PORT of a plaintext port with the same services, for this machine alone, or "".
            check_caller: see `ErrorInterceptor`; None: every caller is answered.
        """
        self._listen = listen
        self._tls, self._demands_client_certificate = tls, demands_client_certificate
        self._loopback_address = loopback_address
        self._health_address = health_address
        self._service_names = tuple(service_names)
        self._health = _EndingHealthServicer()
        options = (
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),
            # A coordinator keeps a session until its reader is known to be gone, so a dead peer must be detected soon.
            ("grpc.keepalive_time_ms", 5_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.http2.ping_timeout_ms", 5_000),
            ("grpc.http2.max_pings_without_data", 0),
            # Links ping every few seconds, also without calls.
            ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
            ("grpc.keepalive_permit_without_calls", 1),
        )
        self.grpc_server = grpc.aio.server(interceptors=[ErrorInterceptor(check_caller)], options=options)
        self._health_server: grpc.aio.Server | None = None
        self.port = 0
        """The bound port; 0 before `start`."""
        self.is_serving = False
        """Whether health is SERVING."""

    @property
    def address(self) -> str:
        """HOST:PORT that the server listens on, after `start`."""
        return join_address(split_address(self._listen)[0], self.port)

    async def start(self) -> None:
        """Bind the port and accept calls; health is NOT_SERVING until `set_serving`.

        Raises:
            Unavailable: an address cannot be bound; the message names the address and the reason.
            InvalidRequest: the certificate files cannot be used.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        names = (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc_server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.port = _bind(
            self.grpc_server, self._listen, self._tls, demands_client_certificate=self._demands_client_certificate
        )
        if self._loopback_address:
            _bind(self.grpc_server, self._loopback_address)
        if self._tls is None and not is_loopback(self._listen):
            _log.warning(
                "plaintext port: messages and keys are readable on the network", extra={"address": self.address}
            )
        await self.grpc_server.start()
        if self._health_address:
            self._health_server = grpc.aio.server(
                interceptors=[ErrorInterceptor()], options=(("grpc.so_reuseport", 0),)
            )
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
            _bind(self._health_server, self._health_address)
            await self._health_server.start()

    async def set_serving(self) -> None:
        """Set health to SERVING, for every service and for the server as a whole."""
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def set_not_serving(self) -> None:
        """Set health to NOT_SERVING; calls are still accepted."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Set NOT_SERVING permanently, refuse new calls, wait `grace_s` for calls in flight, then cancel them."""
        self.is_serving = False
        await self._health.enter_graceful_shutdown()
        self._health.end_watches()
        await self.grpc_server.stop(grace_s)
        if self._health_server is not None:
            await self._health_server.stop(None)

    async def _set_health(self, value: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        self.is_serving = value == health_pb2.HealthCheckResponse.SERVING
        for name in ("", *self._service_names):
            await self._health.set(name, value)


class _EndingHealthServicer(health.aio.HealthServicer):  # type: ignore[misc]
    """A health service that ends its Watch calls when the server stops; they would last for the whole grace period."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = asyncio.Event()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802
        watch = asyncio.ensure_future(super().Watch(request, context))
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({watch, ended}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
        finally:
            for task in (watch, ended):
                task.cancel()

    def end_watches(self) -> None:
        self._ended.set()


def _bind(
    server: grpc.aio.Server, address: str, tls: Tls | None = None, *, demands_client_certificate: bool = False
) -> int:
    require_free(address)  # gRPC itself would print several lines without the reason
    try:
        return open_port(server, address, tls=tls, demands_client_certificate=demands_client_certificate)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {address}") from error
