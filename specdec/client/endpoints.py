"""Addresses that a client may connect to: HOST:PORT, several IP:PORT, or a target in one of gRPC's schemes.

Both clients use this module, and the command line uses it for its usage errors. Connections are made by
`specdec.rpc.channels`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from ipaddress import ip_address

from specdec.contract.errors import InvalidRequest

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
    """Return the gRPC target of an endpoint that a client can connect to.

    Args:
        endpoint: HOST:PORT, which is returned as it is; several of them with commas between, whose hosts are addresses
            of IPv4 or of IPv6; or a gRPC target.

    Raises:
        InvalidRequest: the endpoint has another form, or a port outside 1 to 65535.
    """
    if not isinstance(endpoint, str):
        raise InvalidRequest(f"endpoint must be HOST:PORT, got {type(endpoint).__name__}", field="endpoint")
    if endpoint.startswith(_SCHEMES):
        return endpoint
    if several := [each.strip() for each in endpoint.split(",") if each.strip()] if "," in endpoint else []:
        return join_endpoints([check_endpoint(each) for each in several])
    if url := _URL.match(endpoint):
        meant = url["rest"] if ":" in url["rest"] else f"{url['rest']}:{DEFAULT_PORT}"
        raise _refusal(endpoint, f"without {url['scheme']}://", meant)
    host, colon, port = endpoint.rpartition(":")
    if not colon and _HOST.fullmatch(endpoint):
        raise _refusal(endpoint, "with a port", f"{endpoint}:{DEFAULT_PORT}")
    if not _HOST.fullmatch(host) or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        raise _refusal(endpoint, "with a port of 1 to 65535", "")
    return endpoint


def join_endpoints(addresses: Sequence[str]) -> str:
    """Return the gRPC target of several coordinators.

    Args:
        addresses: IP:PORT of each, at least one.

    Raises:
        InvalidRequest: a host is a name, or the addresses are of both families.
    """
    versions = {_version(address) for address in addresses}
    if len(versions) != 1:
        raise InvalidRequest("endpoint must not mix addresses of IPv4 and IPv6", field="endpoint")
    return f"ipv{versions.pop()}:" + ",".join(addresses)


def may_name_several(target: str) -> bool:
    """Return whether a gRPC target may have several addresses: a list, or a name that is resolved."""
    if target.startswith(("ipv4:", "ipv6:")):
        return "," in target
    if target.startswith("dns:"):
        return True
    return not target.startswith(_SCHEMES) and not _is_one_address(target.rpartition(":")[0])


def _is_one_address(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return bool(ip_address(host.strip("[]")))
    except ValueError:
        return False


def _version(address: str) -> int:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).version
    except ValueError:
        raise InvalidRequest(
            f"endpoint of several coordinators must have IP addresses, got the name {host[:_MAX_SHOWN_CHARACTERS]!r}; "
            "one name that resolves to all of them can be given alone",
            field="endpoint",
        ) from None


def _refusal(endpoint: str, condition: str, suggestion: str) -> InvalidRequest:
    hint = f"; did you mean {suggestion}?" if suggestion else ""
    return InvalidRequest(
        f"endpoint must be HOST:PORT, {condition}, got {endpoint[:_MAX_SHOWN_CHARACTERS]!r}{hint}", field="endpoint"
    )
