"""Addresses that a client may dial: HOST:PORT, or what gRPC has a scheme for.

Not here: dialling (`specdec.rpc.channels`). Called by both clients, and by the command line for its usage errors.
"""

from __future__ import annotations

import re

from specdec.errors import InvalidRequest

#: Of a coordinator, where nothing else is said.
DEFAULT_PORT = 50051

_SCHEMES = ("ipv4:", "ipv6:", "dns:", "unix:", "unix-abstract:", "vsock:", "xds:")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>[^/]*)")
_HOST = re.compile(r"\[[0-9A-Fa-f:.%]+\]|[^\s/:\[\]]+")
_MAX_SHOWN_CHARACTERS = 64


def check_endpoint(endpoint: str) -> str:
    """Returns `endpoint` if it can be one.

    Raises:
        InvalidRequest: it is neither HOST:PORT with a port of 1 to 65535 nor a gRPC target.
    """
    if not isinstance(endpoint, str):
        raise InvalidRequest(f"endpoint must be HOST:PORT, got {type(endpoint).__name__}", field="endpoint")
    if endpoint.startswith(_SCHEMES):
        return endpoint
    if url := _URL.match(endpoint):
        meant = url["rest"] if ":" in url["rest"] else f"{url['rest']}:{DEFAULT_PORT}"
        raise _refused(endpoint, f"without {url['scheme']}://", meant)
    host, colon, port = endpoint.rpartition(":")
    if not colon and _HOST.fullmatch(endpoint):
        raise _refused(endpoint, "with a port", f"{endpoint}:{DEFAULT_PORT}")
    if not _HOST.fullmatch(host) or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        raise _refused(endpoint, "with a port of 1 to 65535", "")
    return endpoint


def _refused(endpoint: str, how: str, instead: str) -> InvalidRequest:
    meant = f"; did you mean {instead}?" if instead else ""
    return InvalidRequest(
        f"endpoint must be HOST:PORT, {how}, got {endpoint[:_MAX_SHOWN_CHARACTERS]!r}{meant}", field="endpoint"
    )
