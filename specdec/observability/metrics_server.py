"""Serves a service's metrics over HTTP, from a thread of its own, for as long as the service runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, start_http_server

from specdec.contract.errors import Unavailable

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_log = logging.getLogger(__name__)


def start_metrics_server(
    registry: CollectorRegistry, host: str, port: int, serves_host: Callable[[Sequence[str]], bool] = lambda hosts: True
) -> Callable[[], None]:
    """Serve `/metrics` from a thread of its own; return a function that stops it.

    Args:
        registry: the metrics.
        host: address to listen on.
        port: port to listen on.
        serves_host: whether a request with these Host headers is answered.

    Raises:
        Unavailable: the address cannot be bound.
    """
    try:
        server, thread = start_http_server(port, addr=host or "0.0.0.0", registry=registry)
    except OSError as error:
        raise Unavailable(f"cannot serve metrics on {host}:{port}: {error.strerror or error}") from error
    server.set_app(_as_text(server.get_app(), serves_host))
    server.handle_error = _note_failure  # type: ignore[method-assign]

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def _note_failure(request: Any, client_address: Any) -> None:
    """Note that a client left, or sent something else than HTTP; the library would print a traceback."""
    _log.debug("a connection to the metrics port failed", exc_info=True, extra={"peer": str(client_address)})


def _as_text(app: WSGIApplication | None, serves_host: Callable[[Sequence[str]], bool]) -> WSGIApplication:
    """Return the application with answers in Prometheus' text format alone, for the hosts that are served.

    In the OpenMetrics format, which Prometheus prefers, `prometheus_client` writes `_` for the colon of `specdec:`.
    """
    assert app is not None  # start_http_server has set it

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST")
        if not serves_host([] if host is None else [host]):
            start_response("403 Forbidden", [("content-type", "text/plain; charset=utf-8")])
            return [b"this port serves a name of loopback, such as localhost, as Host\n"]
        return app({**environ, "HTTP_ACCEPT": "text/plain"}, start_response)

    return answer
