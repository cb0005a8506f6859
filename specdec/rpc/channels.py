"""How an address is dialled and how a port is opened: in plaintext, everywhere.

The one place that decides it, so that credentials have one place to come to. Not here: what a connection is tuned for
(the options of each caller), what is served or asked on it. Called by links, the server, the client SDK and the
command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

Options = Sequence[tuple[str, Any]]
"""gRPC channel arguments: name and value."""


def dial(address: str, options: Options = ()) -> grpc.aio.Channel:
    """A channel for the running event loop; it connects at the first call. `address` is HOST:PORT or a gRPC target."""
    return grpc.aio.insecure_channel(address, options=options)


def dial_blocking(address: str, options: Options = ()) -> grpc.Channel:
    """As `dial`, for threads."""
    return grpc.insecure_channel(address, options=options)


def open_port(server: grpc.aio.Server, address: str) -> int:
    """Lets a server that has not started listen on HOST:PORT; returns the port, which is a free one for port 0.

    Raises:
        RuntimeError: it cannot.
    """
    return server.add_insecure_port(address)
