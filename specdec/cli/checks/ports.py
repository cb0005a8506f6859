"""Checks of open ports: which of them other machines can reach without TLS, and the certificates that they serve."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from specdec.cli.checks.certificates import dates_of, trusting
from specdec.cli.checks.finding import Finding, ok, warn
from specdec.cli.checks.system import is_local
from specdec.cli.listening import dialled_address
from specdec.settings.addresses import join_address, split_address

_TIMEOUT_S = 3.0
_LISTENS = "0A"
#: Modules of our processes, as they stand after `-m` in a command line.
_MODULES = ("coordinator", "draft_service", "gateway", "target_service", "specdec.cli")
_CHILD = "specdec.supervision.child"
_PROTECT = "give the service --tls-cert and --tls-key, or restrict the port with a firewall or network policy"


@dataclass(frozen=True, slots=True)
class Port:
    address: str
    """HOST:PORT at which it listens, or at which it is known."""
    owner: str


def check_ports(known: Iterable[Port]) -> Iterator[Finding]:
    """Try the handshake of TLS with every port that is not bound to loopback.

    Args:
        known: ports of the system, beside those of our processes on this machine.
    """
    ports = {port.address: port for port in (*own_ports(Path("/proc")), *known) if not is_local(port.address)}
    certificates: dict[bytes, str] = {}
    num_encrypted = 0
    for port in ports.values():
        answer = handshake(dialled_address(port.address))
        if answer is None:
            yield warn("open port", f"{port.address} ({port.owner}) answers without TLS", _PROTECT)
        elif answer:
            certificates.setdefault(answer, port.address)
        num_encrypted += bool(answer)
    if not ports:
        yield ok("open ports", "none beyond this machine")
    elif num_encrypted:
        yield ok("open ports", f"{num_encrypted} of {len(ports)} beyond this machine answer with TLS")
    for certificate, address in certificates.items():
        yield from _check_served(certificate, address)


def handshake(address: str) -> bytes | None:
    """Return the certificate that a port serves over TLS; None without TLS, b"" if the port cannot be asked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # expired certificates are to be seen
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        connection = socket.create_connection(split_address(address), timeout=_TIMEOUT_S)
    except OSError:
        return b""
    with connection:
        try:
            with context.wrap_socket(connection) as encrypted:
                return encrypted.getpeercert(binary_form=True) or b""
        except ssl.SSLError as error:
            # An alert is an answer in TLS: the server wants a certificate, for instance.
            return b"" if "ALERT" in (error.reason or "") else None
        except OSError:
            return None


def _check_served(certificate: bytes, address: str) -> Iterator[Finding]:
    """Connect again and trust the certificate itself, because a certificate that was verified can be read."""
    context = trusting(cadata=certificate)
    context.set_alpn_protocols(["h2", "http/1.1"])

    def read() -> dict[str, Any]:
        with (
            socket.create_connection(split_address(address), timeout=_TIMEOUT_S) as connection,
            context.wrap_socket(connection) as encrypted,
        ):
            return encrypted.getpeercert() or {}

    with suppress(OSError):
        yield dates_of("served certificate", read, where=address)


def own_ports(proc: Path) -> Iterator[Port]:
    """Yield the TCP ports at which specdec's processes of this user listen (Linux).

    Args:
        proc: the folder /proc.
    """
    listening = dict(_listening(proc))
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError):
            owner = _module_of(folder)
            for descriptor in (folder / "fd").iterdir() if owner else ():
                with suppress(OSError):
                    inode = str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]")
                    if inode in listening:
                        yield Port(listening[inode], f"{owner}, process {folder.name}")


def _listening(proc: Path) -> Iterator[tuple[str, str]]:
    """Yield inode and HOST:PORT of each listening socket."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENS:
                host, _, port = words[1].partition(":")
                yield words[9], join_address(_host_of(host), int(port, 16))


def _host_of(digits: str) -> str:
    """Return the address that the kernel writes as groups of four bytes, each in the processor's order."""
    packed = b"".join(bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))
    found = ip_address(packed)
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)


def _module_of(folder: Path) -> str:
    """Return the module of a process that is ours; "" for any other process."""
    words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    after = words[words.index("-m") + 1 :] if "-m" in words else []
    named = after[1:2] if after[:1] == [_CHILD] else after[:1]  # `specdec up` starts its services through a module
    return named[0] if named and named[0] in _MODULES else ""
