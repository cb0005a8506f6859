"""Addresses that a client may connect to: HOST:PORT, or a target in one of gRPC's schemes.

Both clients use this module, and the command line uses it for its usage errors. Connections are made by
`specdec.rpc.channels`.
"""

from __future__ import annotations

import os
import re

from specdec.errors import InvalidRequest

#: Port of a coordinator unless another one is given.
DEFAULT_PORT = 50051
DEFAULT_ENDPOINT = f"127.0.0.1:{DEFAULT_PORT}"
#: Environment variable with the endpoint of a client that is given none.
ENDPOINT_VARIABLE = "SPECDEC_ENDPOINT"

_SCHEMES = ("ipv4:", "ipv6:", "dns:", "unix:", "unix-abstract:", "vsock:", "xds:")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>[^/]*)")
_HOST = re.compile(r"\[[0-9A-Fa-f:.%]+\]|[^\s/:\[\]]+")
_MAX_SHOWN_CHARACTERS = 64


def resolve_endpoint(endpoint: str | None) -> str:
    """Return `endpoint`, or for None the one in SPECDEC_ENDPOINT, or the default one of this machine.

    Raises:
        InvalidRequest: the endpoint is neither HOST:PORT with a port of 1 to 65535 nor a gRPC target.
    """
    if endpoint is not None:
        return check_endpoint(endpoint)
    configured = os.environ.get(ENDPOINT_VARIABLE, "")
    if not configured:
        return DEFAULT_ENDPOINT
    try:
        return check_endpoint(configured)
    except InvalidRequest as error:
        raise InvalidRequest(f"{ENDPOINT_VARIABLE}: {error.message}", field="endpoint") from None


def check_endpoint(endpoint: str) -> str:
    """Return `endpoint` if a client can connect to it.

    Raises:
        InvalidRequest: the endpoint is neither HOST:PORT with a port of 1 to 65535 nor a gRPC target.
    """
    if not isinstance(endpoint, str):
        raise InvalidRequest(f"endpoint must be HOST:PORT, got {type(endpoint).__name__}", field="endpoint")
    if endpoint.startswith(_SCHEMES):
        return endpoint
    if url := _URL.match(endpoint):
        meant = url["rest"] if ":" in url["rest"] else f"{url['rest']}:{DEFAULT_PORT}"
        raise _refusal(endpoint, f"without {url['scheme']}://", meant)
    host, colon, port = endpoint.rpartition(":")
    if not colon and _HOST.fullmatch(endpoint):
        raise _refusal(endpoint, "with a port", f"{endpoint}:{DEFAULT_PORT}")
    if not _HOST.fullmatch(host) or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        raise _refusal(endpoint, "with a port of 1 to 65535", "")
    return endpoint


def _refusal(endpoint: str, condition: str, suggestion: str) -> InvalidRequest:
    hint = f"; did you mean {suggestion}?" if suggestion else ""
    return InvalidRequest(
        f"endpoint must be HOST:PORT, {condition}, got {endpoint[:_MAX_SHOWN_CHARACTERS]!r}{hint}", field="endpoint"
    )
