"""Channels and ports: every address is dialled and bound here, in plaintext.

Every connection of the product goes through these functions, so transport security has one place. Called by links, the
server, the client and the command line; it loads gRPC and nothing heavier.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import grpc

from specdec.errors import Unavailable
from specdec.settings.addresses import split_address

Options = Sequence[tuple[str, Any]]
"""gRPC channel arguments: name and value."""

#: gRPC must not repeat a call by itself. If the connection breaks under a call, and no other one can be made, the
#: repeated call gets a status, but its reading of a message never ends (gRPC 1.85), so that its caller waits for ever.
#: Callers repeat what may be repeated.
_NO_RETRIES = (("grpc.enable_retries", 0),)


def dial(address: str, options: Options = ()) -> grpc.aio.Channel:
    """Return a channel for the running event loop; it connects at the first call.

    Args:
        address: HOST:PORT or a gRPC target.
        options: channel arguments of the caller.
    """
    return grpc.aio.insecure_channel(address, options=(*_NO_RETRIES, *options))


def dial_blocking(address: str, options: Options = ()) -> grpc.Channel:
    """Return a channel for threads; otherwise as `dial`."""
    return grpc.insecure_channel(address, options=(*_NO_RETRIES, *options))


def open_port(server: grpc.aio.Server, address: str) -> int:
    """Bind HOST:PORT for a server that has not started; return the port, which is a free one for port 0.

    Raises:
        RuntimeError: the port cannot be bound.
    """
    return server.add_insecure_port(address)


def require_free(address: str) -> None:
    """Check that `address` can be bound, before work that takes long.

    Raises:
        Unavailable: it cannot; the message states the reason.
    """
    host, port = split_address(address)
    try:
        resolved = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = resolved[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC binds: connections of a previous process in TIME_WAIT do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise Unavailable(f"cannot listen on {address}: {error.strerror or error}") from error
