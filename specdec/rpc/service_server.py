"""The gRPC server of every service: error mapping, health, reflection, limits and an orderly shutdown.

    server = ServiceServer("0.0.0.0:50061", service_names=(DRAFT_SERVICE,))
    servicer.add_to(server.grpc_server)
    await server.start()          # the port is bound; health is NOT_SERVING
    ...                           # warm up
    await server.set_serving()
    ...
    await server.stop(grace_s)    # NOT_SERVING; new calls are refused, calls in flight finish

Signals and draining are handled by `specdec.service` and the coordinator's `__main__`.

The server refuses calls of unknown methods before it reads their names. grpcio decodes such a name in the loop that
accepts calls, and a name that is not UTF-8 raises there (seen with grpcio 1.85): the loop ends, every call in flight is
cut, and the port stays closed. So one request of 80 bytes would end a service for all its clients. Every method of our
services is registered, and the core of gRPC hands those out by name; what remains is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specdec.access.tls import Tls
from specdec.contract.errors import Unavailable
from specdec.rpc.channels import MAX_CALLS, call_limits, open_port, require_free
from specdec.rpc.health import Health
from specdec.rpc.interceptors import ErrorInterceptor
from specdec.settings.addresses import is_loopback, join_address, split_address

#: Releases without it decode a name in the task of its call, where an error ends that call alone.
_REGISTERS_METHODS = hasattr(cygrpc.AioServer, "_request_registered_call")


class _RefusingServer(cygrpc.AioServer):  # type: ignore[misc]
    """Answers every call of a method that is not registered with UNIMPLEMENTED."""

    async def _request_call(self) -> Any:
        refusals: set[asyncio.Task[None]] = set()  # the event loop alone would not keep them
        while True:
            task = asyncio.create_task(_refuse(await super()._request_call()))
            refusals.add(task)
            task.add_done_callback(refusals.discard)


async def _refuse(call: Any) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with contextlib.suppress(grpc.aio.BaseError):  # abort raises, also when the caller has left
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


def aio_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
) -> grpc.aio.Server:
    """Return a server for services whose methods are all registered, as generated code does.

    Args:
        interceptors: see `grpc.aio.server`; calls of unknown methods do not reach them.
        options: channel arguments.
    """
    if not _REGISTERS_METHODS:
        return grpc.aio.server(interceptors=interceptors, options=options)
    plain = cygrpc.AioServer
    cygrpc.AioServer = _RefusingServer
    try:
        return grpc.aio.server(interceptors=interceptors, options=options)
    finally:
        cygrpc.AioServer = plain


DRAFT_SERVICE = "specdec.v1.DraftService"
TARGET_SERVICE = "specdec.v1.TargetService"
COORDINATOR_SERVICE = "specdec.v1.CoordinatorService"

_log = logging.getLogger(__name__)


class ServiceServer:
    """A service's gRPC server with its health service.

    Construct it inside a running event loop and use it from that loop.
    """

    def __init__(
        self,
        listen: str,
        *,
        service_names: Sequence[str] = (),
        health: Health | None = None,
        max_message_bytes: int = 4 << 20,
        max_connection_age_s: float | None = None,
        max_calls: int = MAX_CALLS,
        tls: Tls | None = None,
        demands_client_certificate: bool = False,
        loopback_address: str = "",
        check_caller: Callable[[str, Any], None] | None = None,
    ) -> None:
        """
        Args:
            listen: HOST:PORT; port 0 chooses a free port.
            service_names: full protobuf names, for health and reflection. Not read if `health` is given.
            health: health of the process and names of its services; None: a health of this server alone.
            max_message_bytes: gRPC itself refuses a larger message (RESOURCE_EXHAUSTED) before it is decoded.
            max_connection_age_s: age at which a connection takes no further calls, so that its client connects anew;
                its calls go on until they end. None: no limit.
            max_calls: calls at once; further ones are refused with QUEUE_FULL.
            tls: credentials of the port of `listen`; None: plaintext.
            demands_client_certificate: whether `listen` refuses clients without a certificate of `tls.ca`.
            loopback_address: HOST:PORT of a plaintext port with the same services, for this machine alone, or "".
            check_caller: see `ErrorInterceptor`; None: every caller is answered.
        """
        self._listen = listen
        self._tls, self._demands_client_certificate = tls, demands_client_certificate
        self._loopback_address = loopback_address
        self.health = Health(service_names) if health is None else health
        options: list[tuple[str, int]] = [
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
            *call_limits(max_calls),
        ]
        if max_connection_age_s is not None:
            options.append(("grpc.max_connection_age_ms", round(max_connection_age_s * 1000)))
        self.grpc_server = aio_server([ErrorInterceptor(check_caller, max_calls)], options)
        self.port = 0
        """The bound port; 0 before `start`."""

    @property
    def is_serving(self) -> bool:
        """Return whether health is SERVING."""
        return self.health.is_serving

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
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, self.grpc_server)
        names = (*self.health.service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc_server)
        await self.health.start()
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

    async def set_serving(self) -> None:
        """Set health to SERVING, for every service and for the server as a whole."""
        await self.health.set_serving(True)

    async def set_not_serving(self) -> None:
        """Set health to NOT_SERVING; calls are still accepted."""
        await self.health.set_serving(False)

    async def stop(self, grace_s: float) -> None:
        """Set NOT_SERVING permanently, refuse new calls, wait `grace_s` for calls in flight, then cancel them."""
        await self.health.end()
        await self.grpc_server.stop(grace_s)


def _bind(
    server: grpc.aio.Server, address: str, tls: Tls | None = None, *, demands_client_certificate: bool = False
) -> int:
    require_free(address)  # gRPC itself would print several lines without the reason
    try:
        return open_port(server, address, tls=tls, demands_client_certificate=demands_client_certificate)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {address}") from error
