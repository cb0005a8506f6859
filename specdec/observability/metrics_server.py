"""Serves a service's metrics over HTTP, from a thread of its own, for as long as the service runs."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, start_http_server

from specdec.errors import Unavailable


def start_metrics_server(registry: CollectorRegistry, host: str, port: int) -> Callable[[], None]:
    """Serve `/metrics` from a thread of its own; return a function that stops it.

    Raises:
        Unavailable: the address cannot be bound.
    """
    try:
        server, thread = start_http_server(port, addr=host or "0.0.0.0", registry=registry)
    except OSError as error:
        raise Unavailable(f"cannot serve metrics on {host}:{port}: {error.strerror or error}") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
