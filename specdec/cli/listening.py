"""The addresses at which `specdec up` and its services listen: coordinator, gateway and metrics."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Collection, Mapping

from specdec.cli import Usage
from specdec.cli.control import require_unused
from specdec.contract.errors import Unavailable
from specdec.rpc.channels import require_free
from specdec.settings.addresses import WILDCARD_HOSTS, is_loopback, join_address, split_address
from specdec.supervision.processes import free_ports
from specdec.supervision.services import tell

#: Address of the gateway of `specdec serve`.
DEFAULT_HTTP = "127.0.0.1:8000"

#: Variables with the keys of the gateway, which other users of the machine cannot read, unlike a command line.
API_KEYS_VARIABLE = "SPECDEC_GATEWAY__API_KEYS"
API_KEY_VARIABLE = "SPECDEC_GATEWAY__API_KEY"

#: Variable with the key that the services of `specdec up` share.
SERVICE_KEY_VARIABLE = "SPECDEC_SERVICE_KEY"

_NO_GATEWAY = "none"
#: Value of `--metrics` for services without metrics.
NO_METRICS = "none"


def listen_address(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Return the address at which the coordinator is to listen, with a free port in place of port 0.

    Args:
        args: flags of `specdec up`.
        environ: environment of the caller, which the coordinator gets.

    Raises:
        Usage: `--listen` is not an address, or is reached from other machines in plaintext.
        Unavailable: it is in use, or a `specdec up` of this user that is starting will use it (ADDRESS_IN_USE).
    """
    host, port = split_flag("--listen", args.listen)
    require_unused(port)
    address = join_address(host, port or free_ports(1)[0])
    _require_encryption(args, environ, "coordinator", f"--listen {address}", address)
    _require_free("--listen", address)  # else the program that listens there would be taken for our coordinator
    return address


def loopback_address(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Return where programs of this machine reach the coordinator in plaintext if `--listen` has TLS; "": there."""
    return join_address("127.0.0.1", free_ports(1)[0]) if _is_given(args, environ, "coordinator", "tls_cert") else ""


def http_address(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Return the address at which the gateway is to listen, with a free port in place of port 0; "" for no gateway.

    Args:
        args: flags of `specdec up`.
        environ: environment of the caller, which the gateway gets and which may have its keys.

    Raises:
        Usage: `--http` is not an address, or is reached from other machines without a key or in plaintext.
        Unavailable: it is in use (ADDRESS_IN_USE).
    """
    if args.http == _NO_GATEWAY or not (args.http or args.default_http):
        return ""
    if not args.http:
        return _default_http(args.default_http)
    host, port = split_flag("--http", args.http)
    address = join_address(host, port or free_ports(1)[0])
    _require_keys(args, environ, address)
    _require_encryption(args, environ, "gateway", f"--http {address}", address)
    _require_free("--http", address)
    return address


def _default_http(address: str) -> str:
    """Return `address`, or a free port of its host with a note if it is in use."""
    try:
        require_free(address)
    except Unavailable:
        other = join_address(split_address(address)[0], free_ports(1)[0])
        tell(f"note: {address} is in use, so HTTP is served at {other}; choose an address with --http")
        return other
    return address


def _require_keys(args: argparse.Namespace, environ: Mapping[str, str], address: str) -> None:
    given = args.settings
    has_access = any(given.value("gateway", name) for name in ("api_keys", "api_key", "jwt_jwks", "allow_anonymous"))
    if not (has_access or environ.get(API_KEYS_VARIABLE) or environ.get(API_KEY_VARIABLE)) and not is_loopback(address):
        raise Usage(
            f"--http {address} is reached from other machines: give --api-keys or --api-key, or --set "
            "gateway.allow_anonymous=true to answer everyone"
        )


def _require_encryption(
    args: argparse.Namespace, environ: Mapping[str, str], service: str, setting: str, address: str
) -> None:
    allowed = any(_is_given(args, environ, service, name) for name in ("tls_cert", "insecure"))
    if not allowed and not is_loopback(address):
        raise Usage(
            f"{setting} is reached from other machines: give --tls-cert and --tls-key, or --insecure to serve there in "
            "plaintext"
        )


def _is_given(args: argparse.Namespace, environ: Mapping[str, str], service: str, name: str) -> bool:
    """Return whether a service gets a setting, from a flag or from the environment that it inherits."""
    return bool(args.settings.value(service, name) or environ.get(f"SPECDEC_{service.upper()}__{name.upper()}"))


def dialled_address(address: str) -> str:
    """Return what programs of this machine dial to reach a service that listens on `address`."""
    host, port = split_address(address)
    return join_address({"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host), port)


def metrics_addresses(args: argparse.Namespace, names: list[str], endpoint: str, http: str = "") -> dict[str, str]:
    """Return where `--metrics` lets each of the named services serve its metrics; empty without such an address.

    Args:
        args: the flags.
        names: names of the services.
        endpoint: the coordinator's address, from `listen_address`.
        http: the gateway's address, from `http_address`; "": no gateway.

    Raises:
        Usage: `--metrics` is not an address, has too few ports after it, or would take one of these addresses.
        Unavailable: one of them is in use (ADDRESS_IN_USE).
    """
    if args.metrics in ("", NO_METRICS):
        return {}
    host, port = split_flag("--metrics", args.metrics)
    ports = list(range(port, port + len(names))) if port else free_ports(len(names))
    if ports[-1] > 65535:
        raise Usage(f"--metrics: {len(names)} ports are needed from {port} on")
    for flag, taken in (("--listen", endpoint), ("--http", http)):
        if taken and _overlaps(host, ports, taken):
            raise Usage(f"--metrics {args.metrics} takes the ports {ports[0]} to {ports[-1]}, and {flag} is {taken}")
    addresses = {name: join_address(host, each) for name, each in zip(names, ports, strict=True)}
    for address in addresses.values():
        _require_free("--metrics", address)
    return addresses


def _overlaps(host: str, ports: list[int], address: str) -> bool:
    """Return whether `address` is one of the ports of `host`."""
    other_host, other_port = split_address(address)
    is_one_host = host == other_host or host in WILDCARD_HOSTS or other_host in WILDCARD_HOSTS
    return is_one_host and other_port in ports


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
