"""Ask a port of a pod over HTTP, in plaintext or with TLS, without a proxy."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from typing import Any


def ask(
    address: str,
    port: int,
    path: str,
    *,
    tls: ssl.SSLContext | None = None,
    body: Any = None,
    key: str = "",
    timeout_s: float = 120.0,
) -> tuple[int, bytes]:
    """Return status and body of the answer. With a JSON body the request is a POST.

    Args:
        address: IP address of the pod.
        port: its number.
        path: path of the request.
        tls: what certificates are accepted; None: plaintext. The certificate must have the name `specdec` if names are
            checked.
        body: value that is sent as JSON; None: a GET without one.
        key: API key; "" sends none.
        timeout_s: time for the connection, and for each part of the answer.

    Raises:
        OSError: there is no connection, or no trusted one.
        http.client.HTTPException: what answers does not speak HTTP.
    """
    connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        connection.connect()
        if tls is not None:
            plain: socket.socket = connection.sock
            connection.sock = tls.wrap_socket(plain, server_hostname="specdec")
        method, text = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, path, text, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def trusting_anyone() -> ssl.SSLContext:
    """Return a context that accepts every certificate, as the kubelet does."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
