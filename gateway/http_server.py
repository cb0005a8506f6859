"""Serves the application over HTTP: binds the address, tells when it listens, and drains when it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from gateway.http_limits import protocol_with
from specdec.access.tls import reloading_context
from specdec.contract.errors import Unavailable
from specdec.settings.addresses import advertised_address, is_loopback, split_address
from specdec.settings.gateway import GatewaySettings

_BACKLOG = 2048
#: Seconds for which an idle connection is kept; longer than clients and proxies keep theirs (60 s).
_IDLE_S = 75

_log = logging.getLogger("gateway")


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process by the signal instead of with exit code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: ASGIApp, listener: socket.socket, settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Serve on `listener` until `stop` is set, then finish the requests in flight within the settings' grace.

    Raises InvalidRequest if the certificate files cannot be used.
    """
    config = uvicorn.Config(
        app,
        http=protocol_with(settings.header_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        forwarded_allow_ips=[*settings.forwarded_allow_ips] or None,
        backlog=_BACKLOG,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=max(1, round(settings.drain_grace_s)),
    )
    if (tls := settings.server_tls) is not None:
        config.load()
        config.ssl = reloading_context(tls)
    elif not is_loopback(settings.listen):
        _log.warning(
            "plaintext port: messages and keys are readable on the network", extra={"address": settings.listen}
        )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    address = advertised_address("", settings.listen, listener.getsockname()[1])
    _log.info("listening", extra={"address": settings.listen, "advertised": address})
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            _log.info("draining", extra={"grace_s": settings.drain_grace_s})
    finally:
        stopping.cancel()
        server.should_exit = True
        await serving


@contextlib.contextmanager
def bind(address: str) -> Iterator[socket.socket]:
    """Listen on HOST:PORT; connections wait until they are accepted. Raises Unavailable."""
    host, port = split_address(address)
    try:
        resolved = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = resolved[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(address, error) from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise _cannot_listen(address, error) from error
        yield listener


def _cannot_listen(address: str, error: OSError) -> Unavailable:
    return Unavailable(f"cannot listen on {address}: {error.strerror or error}", reason="ADDRESS_IN_USE")
