"""Reads, checks and joins addresses of services: HOST:PORT, or [ADDRESS]:PORT for IPv6."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv6Address, ip_address

WILDCARD_HOSTS = ("0.0.0.0", "::", "")
# The standard forbids underscores in host names, but container networks use them.
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_HOST_HEADER = re.compile(rf"(\[[0-9A-Fa-f:.]+\]|{_HOST_NAME.pattern.replace('(', '(?:', 1)})(?::[0-9]*)?")
_MAX_ADDRESS_CHARACTERS = 300
_MAX_SHOWN_CHARACTERS = 64

#: Host names that gRPC reads as a scheme, such as unix:1 for a socket file.
_SCHEMES = frozenset(
    ("dns", "google-c2p", "google-c2p-experimental", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds")
)

HostRule = Callable[[Sequence[str]], bool]
"""Tells whether a request with these Host headers is answered."""


def split_address(address: str) -> tuple[str, int]:
    """Split `HOST:PORT` (`[::1]:50051` for IPv6) into the host without brackets and the port.

    Raises:
        ValueError: the address has another form, or its port is outside 0..65535.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in host and not bracketed) or "/" in host:
        raise ValueError(f"must be HOST:PORT with a port of 0 to 65535, not {address!r}")
    return host.strip("[]"), int(port)


def check_dialable(address: str) -> str:
    """Return `address` if other machines can dial it, which is stricter than `split_address`.

    Raises:
        ValueError: it is not HOST:PORT with a host's name or address and a port of 1 to 65535, or gRPC would read it
            differently.
    """
    shown = ascii(address[:_MAX_SHOWN_CHARACTERS])
    if not address.isascii() or len(address) > _MAX_ADDRESS_CHARACTERS:
        raise ValueError(f"must be HOST:PORT in at most {_MAX_ADDRESS_CHARACTERS} ASCII characters, not {shown}")
    host, port = split_address(address)
    try:
        is_host = bool(IPv6Address(host)) if address.startswith("[") else _HOST_NAME.fullmatch(host) is not None
    except ValueError:
        is_host = False
    if not is_host or port == 0 or host.lower() in _SCHEMES:
        raise ValueError(f"must be HOST:PORT with a host's name or address and a port above 0, not {shown}")
    return address


def is_loopback(address: str) -> bool:
    """Return whether HOST:PORT is reached from this machine alone."""
    return is_loopback_host(split_address(address)[0])


def is_loopback_host(host: str) -> bool:
    """Return whether a host, without a port, is this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def guarded_address(address: str) -> tuple[str, int, HostRule]:
    """Return host and port of a plain HTTP port at `address`, and the rule for Host headers of its requests."""
    return *split_address(address), host_rule(address)


def host_rule(address: str, listed: Iterable[str] = ()) -> HostRule:
    """Return the rule for Host headers of requests without credentials at a port.

    On loopback, and wherever names are listed, a Host must be a name of loopback or a listed one: by another name, a
    page of any site could call the port, since the site's name may resolve to this machine for a moment (DNS
    rebinding). Beyond loopback without a list, every Host is served.

    Args:
        address: HOST:PORT at which the port listens.
        listed: further names that are served, without ports.
    """
    names = frozenset(map(name_of_host, listed))
    if not names and not is_loopback(address):
        return lambda hosts: True

    def serves(hosts: Sequence[str]) -> bool:
        found = [name_of_host(host) for host in hosts]  # a client that sends none is not a browser
        return len(found) <= 1 and all(name and (name in names or _names_loopback(name)) for name in found)

    return serves


def name_of_host(host: str) -> str:
    """Return the name or address in a Host header, in lower case and without its last dot; "" for a malformed one."""
    found = _HOST_HEADER.fullmatch(host.strip())
    return found[1].strip("[]").lower().removesuffix(".") if found else ""


def _names_loopback(name: str) -> bool:
    return is_loopback_host(name) or name.endswith(".localhost")


def join_address(host: str, port: int) -> str:
    """Return HOST:PORT; the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_advertised(advertise: str) -> str:
    """Return `advertise` if it is HOST:PORT, or a host's name or address without a port.

    Raises:
        ValueError: it is neither.
    """
    if advertise:
        try:
            _split_advertised(advertise)
        except ValueError:
            raise ValueError(f"must be HOST:PORT, or a host without a port, not {advertise[:64]!r}") from None
    return advertise


def advertised_address(advertise: str, listen: str, bound_port: int) -> str:
    """Return the address that other processes should dial: `advertise` if set, else `listen` with the bound port.

    A host without a port gets the bound port: a pod knows its own address, which for IPv6 needs brackets before a port.
    A wildcard host is replaced by this machine's own address, which other containers or pods can reach.
    """
    host, port = _split_advertised(advertise) if advertise else split_address(listen)
    if not advertise and host in WILDCARD_HOSTS:
        host = _own_host()
    return join_address(host, port or bound_port)


def _split_advertised(advertise: str) -> tuple[str, int]:
    """Return host and port; port 0 where there is none. Raises ValueError where `advertise` is no address."""
    try:
        return str(ip_address(advertise.strip("[]"))), 0
    except ValueError:
        pass
    if ":" not in advertise and _HOST_NAME.fullmatch(advertise):
        return advertise, 0
    return split_address(advertise)


def _own_host() -> str:
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return name
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
