"""Channels and ports: every address is dialled and bound here, with credentials or in plaintext.

Every connection of the product goes through these functions, so transport security has one place. Called by links, the
server, the client and the command line; it loads gRPC and nothing heavier.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import grpc

from specdec.access.tls import Tls
from specdec.contract.errors import Unavailable, Unsupported
from specdec.rpc.credentials import channel_credentials, server_credentials
from specdec.settings.addresses import is_loopback_host, split_address

Options = Sequence[tuple[str, Any]]
"""gRPC channel arguments: name and value."""

#: gRPC must not repeat a call by itself. If the connection breaks under a call, and no other one can be made, the
#: repeated call gets a status, but its reading of a message never ends (gRPC 1.85), so that its caller waits for ever.
#: Callers repeat what may be repeated.
_NO_RETRIES = (("grpc.enable_retries", 0),)

#: gRPC must not send links through a proxy that `http_proxy`, `https_proxy` or `grpc_proxy` name for web traffic: it
#: could not reach this machine, and would see what links in plaintext carry, keys included.
NO_PROXY = (("grpc.enable_http_proxy", 0),)

#: Calls of a port at once, and streams of a connection to it, unless the port is given another number.
MAX_CALLS = 4096

#: Calls that gRPC keeps for a port until it takes them, relative to `MAX_CALLS`.
_PENDING_PER_CALL = 4

#: Time for which gRPC keeps a call for a port, as long as its client waits.
_MAX_PENDING_S = 300


def call_limits(max_calls: int = MAX_CALLS) -> Options:
    """Return the server arguments that bound the calls which a port has not taken yet.

    Streams that a client has reset count until they are gone here, so a client that resets its calls at once waits for
    itself and not for others. Further streams of a connection are refused by HTTP/2. By default gRPC ends calls at
    random, as CANCELLED and without a reason, once 1,000 wait or one has waited for 30 s; the port itself refuses with
    a reason.
    """
    return (
        ("grpc.max_concurrent_streams", max_calls),
        ("grpc.http.overload_protection", 1),
        ("grpc.server.max_pending_requests", _PENDING_PER_CALL * max_calls),
        ("grpc.server.max_pending_requests_hard_limit", _PENDING_PER_CALL * max_calls),
        ("grpc.server_max_unrequested_time_in_server", _MAX_PENDING_S),
    )


_dialling_process = 0
"""Process that made the first channel; 0 before."""


def dial(address: str, options: Options = (), *, tls: Tls | None = None, proxy: str = "") -> grpc.aio.Channel:
    """Return a channel for the running event loop; it connects at the first call.

    Args:
        address: HOST:PORT or a gRPC target.
        options: channel arguments of the caller.
        tls: authorities of the server, and this side's certificate if it has one; None: plaintext.
        proxy: URL of the HTTP proxy to connect through; "": none, whatever the environment names.

    Raises:
        InvalidRequest: the files of `tls` cannot be used.
        Unsupported: see `forked`.
    """
    _require_own_process()
    options = (*_NO_RETRIES, *_way(proxy), *options)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=(*options, *_server_name(tls)))


def dial_blocking(address: str, options: Options = (), *, tls: Tls | None = None, proxy: str = "") -> grpc.Channel:
    """Return a channel for threads; otherwise as `dial`."""
    _require_own_process()
    options = (*_NO_RETRIES, *_way(proxy), *options)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, channel_credentials(tls), options=(*options, *_server_name(tls)))


def forked() -> Unsupported:
    """Return the error of a process that was forked after its parent had made a channel.

    The threads and locks of gRPC do not survive the fork: about one such process in fifty would wait for ever while it
    makes its first channel, also with GRPC_ENABLE_FORK_SUPPORT.
    """
    return Unsupported(
        "this process was forked after connections had been made, which gRPC does not survive: start processes by "
        'multiprocessing.get_context("spawn"), or make the first call after the fork'
    )


def _require_own_process() -> None:
    global _dialling_process
    if _dialling_process not in (0, os.getpid()):
        raise forked()
    if not _dialling_process:
        # Otherwise gRPC stops its threads before every fork of this process, and about one fork in a thousand waits for
        # a thread of its timers for ever (gRPC 1.85). Channels make gRPC read the variable.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    _dialling_process = os.getpid()


def is_local(address: str) -> bool:
    """Return whether packets to an address certainly stay on this machine: a Unix socket, or loopback alone.

    Args:
        address: HOST:PORT or a gRPC target, such as ipv4:A:1,B:2.
    """
    scheme, colon, rest = address.partition(":")
    if scheme in ("unix", "unix-abstract") and colon:
        return True
    if scheme in ("ipv4", "ipv6", "dns"):
        return all(_is_loopback(each) for each in rest.rpartition("/")[2].split(","))
    return _is_loopback(address)


def _is_loopback(address: str) -> bool:
    """Return whether an address, with or without a port, is one of loopback."""
    host, colon, port = address.rpartition(":")
    return is_loopback_host((host if colon and port.isdecimal() else address).strip("[]"))


def open_port(
    server: grpc.aio.Server | grpc.Server,
    address: str,
    *,
    tls: Tls | None = None,
    demands_client_certificate: bool = False,
) -> int:
    """Bind HOST:PORT for a server that has not started; return the port, which is a free one for port 0.

    Args:
        server: the server.
        address: HOST:PORT.
        tls: the server's certificate, and the authorities of its clients; None: plaintext.
        demands_client_certificate: whether clients without a certificate of these authorities are refused.

    Raises:
        RuntimeError: the port cannot be bound.
        InvalidRequest: the files of `tls` cannot be used.
    """
    if tls is None:
        return server.add_insecure_port(address)
    credentials = server_credentials(tls, demands_client_certificate=demands_client_certificate)
    return server.add_secure_port(address, credentials)


def _way(proxy: str) -> Options:
    return (("grpc.http_proxy", proxy),) if proxy else NO_PROXY


def _server_name(tls: Tls) -> Options:
    return (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()


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
