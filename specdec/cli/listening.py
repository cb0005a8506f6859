"""The addresses at which `specdec up` and its services listen: the coordinator's, and those of metrics."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Collection

from specdec.cli import Usage
from specdec.cli.control import require_unused
from specdec.errors import Unavailable
from specdec.rpc.channels import require_free
from specdec.settings.addresses import WILDCARD_HOSTS, join_address, split_address
from specdec.supervision.processes import free_ports


def listen_address(args: argparse.Namespace) -> str:
    """Return the address at which the coordinator is to listen, with a free port in place of port 0.

    Raises:
        Usage: `--listen` is not an address.
        Unavailable: it is in use, or a `specdec up` of this user that is starting will use it (ADDRESS_IN_USE).
    """
    host, port = split_flag("--listen", args.listen)
    require_unused(port)
    address = join_address(host, port or free_ports(1)[0])
    _require_free("--listen", address)  # else the program that listens there would be taken for our coordinator
    return address


def metrics_addresses(args: argparse.Namespace, names: list[str], endpoint: str) -> dict[str, str]:
    """Return where each of the named services serves its metrics; empty without `--metrics`.

    Args:
        args: the flags.
        names: names of the services.
        endpoint: the coordinator's address, from `listen_address`.

    Raises:
        Usage: `--metrics` is not an address, has too few ports after it, or would take the coordinator's.
        Unavailable: one of them is in use (ADDRESS_IN_USE).
    """
    if not args.metrics:
        return {}
    host, port = split_flag("--metrics", args.metrics)
    ports = list(range(port, port + len(names))) if port else free_ports(len(names))
    if ports[-1] > 65535:
        raise Usage(f"--metrics: {len(names)} ports are needed from {port} on")
    listening_host, listening_port = split_address(endpoint)
    is_one_host = host == listening_host or host in WILDCARD_HOSTS or listening_host in WILDCARD_HOSTS
    if is_one_host and listening_port in ports:
        raise Usage(f"--metrics {args.metrics} takes the ports {ports[0]} to {ports[-1]}, and --listen is {endpoint}")
    addresses = {name: join_address(host, each) for name, each in zip(names, ports, strict=True)}
    for address in addresses.values():
        _require_free("--metrics", address)
    return addresses


def later_metrics_address(args: argparse.Namespace, taken: Collection[str]) -> str:
    """Return where a service that is started later serves its metrics: the next port, or a free one.

    Args:
        args: the flags, with `--metrics`.
        taken: addresses of the services before it.
    """
    host, port = split_flag("--metrics", args.metrics)
    following = max(split_address(address)[1] for address in taken) + 1
    if port and following <= 65535:
        with contextlib.suppress(Unavailable):
            require_free(join_address(host, following))
            return join_address(host, following)
    return join_address(host, free_ports(1)[0])


def split_flag(flag: str, address: str) -> tuple[str, int]:
    """Return host and port of a flag's value. Raises Usage if it is not an address."""
    try:
        return split_address(address)
    except ValueError as error:
        raise Usage(f"{flag}: {error}") from None


def _require_free(flag: str, address: str) -> None:
    """Raises Unavailable (ADDRESS_IN_USE) with the flag that takes another address."""
    try:
        require_free(address)
    except Unavailable as error:
        raise Unavailable(f"{error.message}; choose another address with {flag}", reason="ADDRESS_IN_USE") from error
